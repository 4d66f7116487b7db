"""load_config: a file or preset, plus overrides, as one frozen Config; all problems are reported at once."""

import copy
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from llmtrain.compat.upgrade import is_old, is_old_name, move_gradient_checkpointing, moved_lines, upgrade
from llmtrain.config.build_sections import build_sections
from llmtrain.config.check_plugins import check_plugins
from llmtrain.config.document import Document, dump_document, parse_value, read_document
from llmtrain.config.extends import with_bases
from llmtrain.config.kind_change import chosen_kind, drop_other_kinds, drop_other_objective
from llmtrain.config.kubernetes_syntax import syntax_problems
from llmtrain.config.launch import LaunchSection
from llmtrain.config.optimizer_change import change_optimizer, chosen_optimizer, fill_trainer_section
from llmtrain.config.problems import Problems, shown
from llmtrain.config.python_values import plain_value
from llmtrain.config.schema import (
    SCHEMA_VERSION,
    SECTIONS,
    SECTIONS_BY_NAME,
    Config,
    classes_of,
    subsection,
    takes_any_name,
)
from llmtrain.config.section import Section
from llmtrain.config.yaml_errors import explain_value_error
from llmtrain.core.arguments import as_text
from llmtrain.core.env import WORKER
from llmtrain.core.files import is_there
from llmtrain.errors import ConfigError, UsageError, nearest

DEFAULT_PRESET = "gpt_stdlib"
ConfigSource = str | Path | Mapping[str, Any] | Config
"""A preset or file by name, the sections of a config, or a config."""
Override = str | tuple[str, Any]
"""`section.field=value` with the value as YAML, or (`section.field`, value)."""


def load_config(
    source: ConfigSource | None = None,
    overrides: Sequence[Override] = (),
    *,
    for_launch: bool = False,
    processes: int = 1,
    overridden_by: str = "--set",
    on_note: Callable[[str], None] = lambda note: print(f"note: {note}", file=sys.stderr),
) -> Config:
    """Load a config (default: the preset gpt_stdlib) and apply overrides. Plugins are imported from the current
    directory and the config's too. `for_launch`: see `build_config`; plugins may be in the image only.
    `processes`: a default batch is split into at least this number of micro-batches.
    `overridden_by`: what messages call an override. `on_note` gets what an upgrade from an earlier schema changed."""
    notes: list[str] = []
    document, path = read_config(source, notes, for_launch=for_launch)
    config = build_config(
        document, overrides, notes, for_launch=for_launch, processes=processes, overridden_by=overridden_by
    )
    if notes and os.environ.get("RANK", "0") == "0" and os.environ.get(WORKER) != "1":  # once per run
        on_note(f"{document.source}: {'; '.join(notes)}.")
    if not for_launch:
        keys = overridden_keys(overrides)
        check_plugins(config, document, [path.parent], overridden=keys, overridden_by=overridden_by)
    return config


def read_config(source: ConfigSource | None, notes: list[str], *, for_launch: bool = False) -> tuple[Document, Path]:
    """The document of a config with its bases, not checked yet, and its path."""
    document, path = _read(DEFAULT_PRESET if source is None else source)
    return with_bases(document, path, _find_base, notes, for_launch=for_launch), path


def _read(source: ConfigSource) -> tuple[Document, Path]:
    """The document and its path; one that is not a file extends others as if it were one in the current directory."""
    if isinstance(source, Config):
        return Document("config", source.as_dict()), Path("config")
    if isinstance(source, Mapping):
        try:
            return Document("config", plain_value(source)), Path("config")
        except ValueError as problem:
            raise ConfigError("config", [str(problem)]) from None
    path = find_config(as_text("config", source))
    return read_document(path), path


def build_config(
    document: Document,
    overrides: Sequence[Override] = (),
    notes: list[str] | None = None,
    *,
    for_launch: bool = False,
    is_launched: bool = False,
    is_recorded: bool = False,
    processes: int = 1,
    overridden_by: str = "--set",
) -> Config:
    """The config of a parsed document. What an upgrade from an earlier schema changed is added to `notes`.
    `for_launch`: fields that earlier schemas had for pods decide. `is_recorded`: the config of a run, readable without
    the plugins that it names. `is_launched`: on a cluster, readable also with a secret in it."""
    notes = [] if notes is None else notes
    values = copy.deepcopy(document.values)
    version = values.get("schema_version", SCHEMA_VERSION)
    if is_old(version):
        document = Document(document.source, document.values, moved_lines(document.lines))
    problems = Problems(document, overridden_keys(overrides), overridden_by)
    pairs = _parse_overrides(overrides, problems)

    # The document in the current schema. An override may choose another kind of a section than the document has.
    chosen = _chosen_kinds(pairs)
    if is_old(version):
        # Overrides with old names are part of the old document; the others are applied to the upgraded one.
        _apply([pair for pair in pairs if is_old_name(pair[0], version)], values, problems)
        pairs = [pair for pair in pairs if not is_old_name(pair[0], version)]
        upgraded = upgrade(values, version, chosen, for_launch=for_launch or is_launched)
        values = upgraded.values
        for text in upgraded.problems:
            problems.add(text)
        notes.append(f"schema_version {version} was upgraded to {SCHEMA_VERSION}")
        notes += [note for field, note in upgraded.notes.items() if field not in dict(pairs)]
    elif version == SCHEMA_VERSION:
        notes += drop_other_kinds(values, chosen).values()
    else:
        known = f"Known: 1, 2, {SCHEMA_VERSION}."
        problems.add(f"schema_version {shown(version)} is unknown. {known}", ("schema_version",))
        values["schema_version"] = SCHEMA_VERSION  # to check the sections, too

    # Overrides, and the defaults that follow from other fields.
    former_optimizer = chosen_optimizer(values)
    drop_other_objective(values, dict(pairs).get("trainer.objective.name"))
    _apply(pairs, values, problems)
    for note in (change_optimizer(values, former_optimizer, dict(pairs)), move_gradient_checkpointing(values)):
        if note:
            notes.append(note)
    fill_trainer_section(values, processes)

    # Each section alone; then, if all are valid, the config as a whole.
    sections = build_sections(values, problems, is_recorded=is_recorded or is_launched)
    launch = sections.get("launch")
    if isinstance(launch, LaunchSection) and not is_launched:
        _check_launch(launch, problems, is_recorded)
    if not problems:
        config = Config.model_construct(**sections)
        for _, text in config.problems():
            problems.add(text)
    if problems:
        raise ConfigError(document.source, problems.sorted())
    return config


def _check_launch(launch: LaunchSection, problems: Problems, is_recorded: bool) -> None:
    """Secrets in a section, and in a new config also what the API server would refuse."""
    found = list(launch.secret_problems())
    if not is_recorded:
        found += syntax_problems(launch)
    for _, text in found:
        problems.add(text)


def find_config(source: str | Path) -> Path:
    """A path as it is, or the file of a preset named without a suffix."""
    path = Path(source)
    is_path = bool(path.suffix) or len(path.parts) != 1
    if path.is_file() or (is_path and is_there(path)):
        return path
    presets = list_presets()
    if not is_path and str(source) in presets:
        return presets[str(source)]
    files = [str(each) for each in path.parent.glob("*.y*ml")]
    if is_path:
        raise UsageError(
            f"Config file {path} does not exist.{nearest(str(path), [*files, *presets])}",
            remedy="Pass a file, or the name of a preset; `llmtrain presets` lists them.",
        )
    raise UsageError(
        f"'{source}' is neither a file nor a preset.{nearest(str(source), [*presets, *files])}",
        known=presets,
        like=str(source),
        remedy="`llmtrain presets` lists the presets.",
    )


def list_presets() -> dict[str, Path]:
    """Presets by name: inside an installed package, or configs/presets of a checkout."""
    package = Path(__file__).resolve().parents[1]
    directory = package / "presets"
    if not directory.is_dir():
        directory = package.parents[1] / "configs" / "presets"
    return {path.stem: path for path in sorted(directory.glob("*.yaml"))}


def dump_config(config: Config) -> str:
    """The resolved config as YAML, sections in the schema's order."""
    return dump_document(config.as_dict())


def _find_base(name: str, directory: Path) -> Path:
    """The base of a config in this directory: a path relative to it, or a preset."""
    path = Path(name).expanduser()
    if path.suffix or len(path.parts) != 1 or (directory / path).is_file():
        return find_config(directory / path)
    return find_config(name)


def overridden_keys(overrides: Sequence[Override]) -> list[str]:
    return [_split(override)[0].strip() for override in overrides]


def _split(override: Override) -> tuple[str, Any]:
    """Key and value; a text without `=` has the value None."""
    if not isinstance(override, str):
        return override
    key, equals, value = override.partition("=")
    if not equals:
        return key, None
    return key, value


def _parse_overrides(overrides: Sequence[Override], problems: Problems) -> list[tuple[str, Any]]:
    """(key, value) of each valid override, in order; what is wrong with the others is added to problems."""
    pairs = []
    for override in overrides:
        key, value = _split(override)
        is_text = isinstance(override, str)
        names = [name for name in key.split(".") if not name.isdecimal()]  # not the numbers of a list's items
        if (is_text and value is None) or not 2 <= len(names) <= 3:
            text = override
            if not isinstance(override, str):
                text = f"{key}={shown(value)}"
            problems.add(f"{problems.overridden_by} {text}: write it as section.field=value, such as trainer.lr=1e-3.")
            continue
        try:
            if is_text:
                value = parse_value(value)
            else:
                value = plain_value(value)
        except (yaml.YAMLError, ValueError) as problem:
            why = f"{problem}."
            if is_text:
                why = explain_value_error(problem, value)
            problems.add(f"{problems.overridden_by} {key}: {why}")
            continue
        pairs.append((key.strip(), value))
    return pairs


def _chosen_kinds(pairs: list[tuple[str, Any]]) -> dict[str, dict[str, Any]]:
    """What overrides choose of the sections with several kinds."""
    chosen = {}
    for section in SECTIONS_BY_NAME:
        fields = {key.removeprefix(f"{section}."): value for key, value in pairs}
        chosen[section] = chosen_kind(fields)
    return chosen


def _apply(pairs: list[tuple[str, Any]], values: dict[str, Any], problems: Problems) -> None:
    for key, value in pairs:
        *parents, field = key.split(".")
        kinds = _kinds_of(parents[0])
        is_field = len(parents) > 1 and any(parents[1] in kind.model_fields for kind in kinds)
        if is_field and not any(_has_fields(kind, parents[1]) for kind in kinds):
            problems.add(f"{problems.overridden_by} {key}: {'.'.join(parents)} is not a section.")
            continue
        target: Any = values
        for name in parents:
            if isinstance(target, dict):
                if target.get(name) is None:  # an empty section, `run:`, is None
                    target[name] = {}
                target = target[name]
            elif isinstance(target, list):
                target = item_of(target, name)
        if isinstance(target, dict):
            target[field] = value
        elif isinstance(target, list) and field.isdecimal() and int(field) < len(target):
            target[int(field)] = value
        else:
            problems.add(f"{problems.overridden_by} {key}: {'.'.join(parents)} is not a section in this document.")


def item_of(items: list[Any], number: str) -> Any:
    """An item of a list by its number, such as `0` in data.sources.0.weight; None if there is none."""
    if number.isdecimal() and int(number) < len(items):
        return items[int(number)]
    return None


def _kinds_of(section: str) -> list[type[Section]]:
    """The classes that a section may have; none for a name that is not a section."""
    if section not in SECTIONS:
        return []
    return classes_of(section)


def _has_fields(kind: type[Section], field: str) -> bool:
    return subsection(kind, field) is not None or takes_any_name(kind, field)


def flat_overrides(overrides: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """{"trainer": {"lr": 1e-3}} as [("trainer.lr", 1e-3)]: sections inside a mapping become keys with dots."""
    flat: list[tuple[str, Any]] = []
    for key, value in overrides.items():
        section, _, field = key.partition(".")
        if not isinstance(value, Mapping) or not _is_section(section, field) or (field and not value):
            flat.append((key, value))  # an empty mapping is the value of a field: model.lora: {}
            continue
        flat += flat_overrides({f"{key}.{name}": item for name, item in value.items()})
    return flat


def _is_section(section: str, field: str) -> bool:
    """Whether the name of a section, or of a section inside it."""
    if not field:
        return True
    return "." not in field and any(subsection(kind, field) for kind in _kinds_of(section))
