"""load_config: a file or preset, plus overrides, as one frozen Config; all problems are reported at once."""

import copy
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llmtrain.arguments import as_text
from llmtrain.config.check_plugins import check_plugins
from llmtrain.config.document import Document, KeyPath, dump_document, parse_value, read_document
from llmtrain.config.extends import with_bases
from llmtrain.config.launch import LaunchSection
from llmtrain.config.optimizer_change import change_optimizer, chosen_optimizer, fill_trainer_section
from llmtrain.config.problems import Problems, describe_error, describe_unknown, describe_unknown_kind, shown
from llmtrain.config.schema import (
    CUSTOM,
    KINDS,
    SCHEMA_VERSION,
    SECTIONS,
    Config,
    classes_of,
    section_class,
    subsection,
    takes_any_name,
)
from llmtrain.config.section import Section
from llmtrain.config.upgrade import (
    chosen_kind,
    drop_other_kinds,
    is_old,
    is_old_name,
    move_gradient_checkpointing,
    moved_lines,
    upgrade,
)
from llmtrain.config.yaml_errors import explain_value_error
from llmtrain.env import WORKER
from llmtrain.errors import ConfigError, UsageError, nearest
from llmtrain.plugins import is_plugin
from llmtrain.registry import PLUGINS

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
    """Load a config (default: the preset gpt_stdlib) and apply overrides. Classes of the user's own are imported from
    the current directory and the config's too. `for_launch`: see `build_config`; such classes may be in the image only.
    `processes`: a default batch is split into at least this number of micro-batches.
    `overridden_by`: what messages call an override. `on_note` gets what an upgrade from an earlier schema changed."""
    notes: list[str] = []
    document, path = _read(DEFAULT_PRESET if source is None else source)
    document = with_bases(document, path, _find_base, notes, for_launch=for_launch)
    config = build_config(
        document, overrides, notes, for_launch=for_launch, processes=processes, overridden_by=overridden_by
    )
    if notes and os.environ.get("RANK", "0") == "0" and os.environ.get(WORKER) != "1":  # once per run
        on_note(f"{document.source}: {'; '.join(notes)}.")
    if not for_launch:
        keys = overridden_keys(overrides)
        check_plugins(config, document, [path.parent], overridden=keys, overridden_by=overridden_by)
    return config


def _read(source: ConfigSource) -> tuple[Document, Path]:
    """The document and its path; one that is not a file extends others as if it were one in the current directory."""
    if isinstance(source, Config | Mapping):
        values = source.as_dict() if isinstance(source, Config) else _plain(source)
        return Document("config", values), Path("config")
    path = find_config(as_text("config", source))
    return read_document(path), path


def _plain(value: Any) -> Any:
    """A value from Python as YAML would have it: mappings as dicts, tuples as lists, paths as text."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, os.PathLike) else value


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
    the classes of the user's own that it names. `is_launched`: on a cluster, readable also with a secret in it."""
    values = copy.deepcopy(document.values)
    version = values.get("schema_version", SCHEMA_VERSION)
    if is_old(version):
        document = Document(document.source, document.values, moved_lines(document.lines))
    problems = Problems(document, overridden_keys(overrides), overridden_by)
    pairs = [pair for each in overrides if (pair := _parse_override(each, problems))]
    chosen = {
        section: chosen_kind({key.removeprefix(f"{section}."): value for key, value in pairs}) for section in KINDS
    }
    if is_old(version):
        old = [pair for pair in pairs if is_old_name(pair[0], version)]
        pairs = [pair for pair in pairs if not is_old_name(pair[0], version)]
        _apply(old, values, problems)
        upgraded = upgrade(values, version, chosen, for_launch=for_launch or is_launched)
        values = upgraded.values
        for text in upgraded.problems:
            problems.add(text)
        if notes is not None:
            notes += [f"schema_version {version} was upgraded to {SCHEMA_VERSION}"]
            notes += [note for field, note in upgraded.notes.items() if field not in dict(pairs)]
    elif version != SCHEMA_VERSION:
        known = f"Known: 1, 2, {SCHEMA_VERSION}."
        problems.add(f"schema_version {shown(version)} is unknown. {known}", ("schema_version",))
        values["schema_version"] = SCHEMA_VERSION
    else:
        dropped = drop_other_kinds(values, chosen)
        if notes is not None:
            notes += dropped.values()
    former = chosen_optimizer(values)
    _apply(pairs, values, problems)
    changes = [change_optimizer(values, former, dict(pairs)), move_gradient_checkpointing(values)]
    if notes is not None:
        notes += [change for change in changes if change]
    fill_trainer_section(values, processes)
    sections = _build_sections(values, problems, is_recorded=is_recorded or is_launched)
    launch = sections.get("launch")
    if isinstance(launch, LaunchSection) and not is_launched:
        for _, text in launch.secret_problems():
            problems.add(text)
    config = None if problems else Config.model_construct(**sections)
    for _, text in config.problems() if config else ():
        problems.add(text)
    if config is None or problems:
        raise ConfigError(document.source, problems.sorted())
    return config


def find_config(source: str | Path) -> Path:
    """A path as it is, or the file of a preset named without a suffix."""
    path = Path(source)
    if path.is_file() or path.suffix or len(path.parts) != 1:
        return path
    presets = list_presets()
    if str(source) in presets:
        return presets[str(source)]
    raise UsageError(f"'{source}' is neither a file nor a preset.{nearest(str(source), presets)}", known=presets)


def list_presets() -> dict[str, Path]:
    """Presets by name: inside an installed package, or configs/presets of a checkout."""
    package = Path(__file__).resolve().parents[1]
    directory = next(d for d in (package / "presets", package.parents[1] / "configs" / "presets") if d.is_dir())
    return {path.stem: path for path in sorted(directory.glob("*.yaml"))}


def dump_config(config: Config) -> str:
    """The resolved config as YAML, sections in the schema's order."""
    return dump_document(config.as_dict())


def _find_base(name: str, directory: Path) -> Path:
    """The base of a config in this directory: a path relative to it, or a preset."""
    path = Path(name).expanduser()
    if path.suffix or len(path.parts) != 1 or (directory / path).is_file():
        return directory / path
    return find_config(name)


def _key(override: Override) -> str:
    return override.partition("=")[0].strip() if isinstance(override, str) else override[0]


def _parse_override(override: Override, problems: Problems) -> tuple[str, Any] | None:
    key, equals, value = override.partition("=") if isinstance(override, str) else (override[0], "=", override[1])
    text = override if isinstance(override, str) else f"{key}={value!r}"
    if not equals or not 1 <= key.count(".") <= 2:
        problems.add(f"{problems.overridden_by} {text}: write it as section.field=value, such as trainer.lr=1e-3.")
        return None
    try:
        return key.strip(), parse_value(value) if isinstance(override, str) else _plain(value)
    except (yaml.YAMLError, ValueError) as problem:
        problems.add(f"{problems.overridden_by} {key}: {explain_value_error(problem, value)}")
        return None


def _apply(pairs: list[tuple[str, Any]], values: dict[str, Any], problems: Problems) -> None:
    for key, value in pairs:
        *parents, field = key.split(".")
        kinds = classes_of(parents[0]) if parents[0] in SECTIONS else []
        is_field = len(parents) > 1 and any(parents[1] in kind.model_fields for kind in kinds)
        if is_field and not any(_has_fields(kind, parents[1]) for kind in kinds):
            problems.add(f"{problems.overridden_by} {key}: {'.'.join(parents)} is not a section.")
            continue
        target: Any = values
        for name in parents:
            if isinstance(target, dict):
                target[name] = {} if target.get(name) is None else target[name]
                target = target[name]
        if isinstance(target, dict):
            target[field] = value
        else:
            problems.add(f"{problems.overridden_by} {key}: {'.'.join(parents)} is not a section in this document.")


def _has_fields(kind: type[Section], field: str) -> bool:
    return subsection(kind, field) is not None or takes_any_name(kind, field)


def flat_overrides(overrides: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """{"trainer": {"lr": 1e-3}} as [("trainer.lr", 1e-3)]: sections inside a mapping become keys with dots."""
    flat: list[tuple[str, Any]] = []
    for key, value in overrides.items():
        section, _, field = key.partition(".")
        kinds = classes_of(section) if section in SECTIONS else []
        is_section = not field or any(subsection(kind, field) for kind in kinds)
        if isinstance(value, Mapping) and is_section and key.count(".") < 2 and (value or not field):
            flat += flat_overrides({f"{key}.{name}": item for name, item in value.items()})
        else:
            flat.append((key, value))
    return flat


def overridden_keys(overrides: Sequence[Override]) -> list[str]:
    return [_key(each) for each in overrides]


def _build_sections(values: dict[str, Any], problems: Problems, is_recorded: bool) -> dict[str, Any]:
    """The valid sections; what is wrong is added to problems."""
    for name in values:
        if not isinstance(name, str):
            problems.add(f"names of sections must be text, got {shown(name)}.")
        elif name not in SECTIONS and name != "schema_version":
            problems.add(describe_unknown((name,), SECTIONS, None), (name,))
    sections = {}
    for name in SECTIONS:
        fields = values.get(name)
        fields = {} if fields is None else fields
        if not isinstance(fields, dict):
            problems.add(f"{name} must be a section with fields, got {shown(fields)}.", (name,))
            continue
        kind = section_class(name, fields)
        if kind is None or (kind is CUSTOM.get(name) and not is_recorded and not _is_plugin(name, fields["name"])):
            field, text = describe_unknown_kind(name, fields)
            problems.add(text, (name, field))
            continue
        section, errors = _build_section(kind, fields)
        for path, text in _descriptions(name, kind, fields, errors).items():
            problems.add(text, path)
        if section:
            bad = {str(error["loc"][0]) for error in errors if error["loc"]}
            for concerned, text in section.problems():
                if not bad.intersection(concerned):
                    problems.add_combination(name, concerned, text)
            sections[name] = section
    return sections


def _is_plugin(section: str, name: str) -> bool:
    return is_plugin(PLUGINS[f"{section}.name"], name)


def _descriptions(
    name: str, kind: type[Section], fields: dict[str, Any], errors: list[ErrorDetails]
) -> dict[KeyPath, str]:
    """Text by field; of several errors of a field (one per item, or per member of a union) the first."""
    found: dict[KeyPath, str] = {}
    for error in errors:
        path = (name, *(str(part) for part in error["loc"]))
        found.setdefault(path[:3], describe_error(path, error, kind, fields.get(path[1]) if len(path) > 1 else None))
    return found


def _build_section(kind: type[Section], fields: dict[str, Any]) -> tuple[Section | None, list[ErrorDetails]]:
    """The section without its invalid fields (so that the others can be checked too), and the errors."""
    try:
        return kind(**fields), []
    except ValidationError as error:
        errors = error.errors(include_url=False)
    except TypeError:  # a key that is not a string
        raise ConfigError(kind.__name__, ["field names must be text"]) from None
    bad = {str(row["loc"][0]) for row in errors if row["loc"]}
    try:
        return kind(**{key: value for key, value in fields.items() if key not in bad}), errors
    except ValidationError:
        return None, errors
