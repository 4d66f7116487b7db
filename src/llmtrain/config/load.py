"""load_config: a file or preset, plus overrides, as one frozen Config; all problems are reported at once."""

import copy
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llmtrain.config.check_plugins import check_plugins
from llmtrain.config.document import Document, dump_document, parse_value, read_document
from llmtrain.config.launch import LaunchSection
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
from llmtrain.config.upgrade import current_name, drop_other_kinds, is_old, is_old_name, moved_lines, upgrade
from llmtrain.env import WORKER
from llmtrain.errors import ConfigError, UsageError, nearest
from llmtrain.plugins import installed_names, is_plugin
from llmtrain.registry import PLUGINS
from llmtrain.text import one_line

DEFAULT_PRESET = "gpt_stdlib"
SHOWN_LENGTH = 200


def load_config(source: str | Path | None = None, overrides: Sequence[str] = (), *, for_launch: bool = False) -> Config:
    """Load a config file or a preset by name (default: gpt_stdlib) and apply `section.field=value` overrides. Classes
    of the user's own are imported from the current directory and the config's too. `for_launch`: see `build_config`;
    such classes may be in the image only."""
    path = find_config(source if source is not None else DEFAULT_PRESET)
    document = read_document(path)
    notes: list[str] = []
    config = build_config(document, overrides, notes, for_launch=for_launch)
    if notes and os.environ.get("RANK", "0") == "0" and os.environ.get(WORKER) != "1":  # once per run
        print(f"note: {document.source}: {'; '.join(notes)}.", file=sys.stderr)
    if not for_launch:
        check_plugins(config, document, [path.parent])
    return config


def build_config(
    document: Document,
    overrides: Sequence[str] = (),
    notes: list[str] | None = None,
    *,
    for_launch: bool = False,
    is_launched: bool = False,
    is_recorded: bool = False,
) -> Config:
    """The config of a parsed document. What an upgrade from an earlier schema changed is added to `notes`.
    `for_launch`: fields that earlier schemas had for pods decide. `is_recorded`: the config of a run, readable without
    the classes of the user's own that it names. `is_launched`: on a cluster, readable also with a secret in it."""
    values = copy.deepcopy(document.values)
    problems: list[str] = []
    pairs = [pair for text in overrides if (pair := _parse_override(text, problems))]
    version = values.get("schema_version", SCHEMA_VERSION)
    if is_old(version):
        old = [pair for pair in pairs if is_old_name(pair[0], version)]
        pairs = [pair for pair in pairs if not is_old_name(pair[0], version)]
        _apply(old, values, problems)
        names = {section: dict(pairs).get(f"{section}.name") for section in KINDS}
        upgraded = upgrade(values, version, names, for_launch=for_launch or is_launched)
        values = upgraded.values
        problems += upgraded.problems
        if notes is not None:
            notes += [f"schema_version {version} was upgraded to {SCHEMA_VERSION}"]
            notes += [note for field, note in upgraded.notes.items() if field not in dict(pairs)]
        document = Document(document.source, document.values, moved_lines(document.lines))
    elif version != SCHEMA_VERSION:
        problems.append(f"schema_version {_shown(version)} is unknown. Known: 1, 2, {SCHEMA_VERSION}.")
        values["schema_version"] = SCHEMA_VERSION
    else:
        dropped = drop_other_kinds(values, {section: dict(pairs).get(f"{section}.name") for section in KINDS})
        if notes is not None:
            notes += dropped.values()
    _apply(pairs, values, problems)
    sections = _build_sections(
        values, document, problems, {key for key, _ in pairs}, is_recorded=is_recorded or is_launched
    )
    launch = sections.get("launch")
    if isinstance(launch, LaunchSection) and not is_launched:
        problems += [text for _, text in launch.secret_problems()]
    config = None if problems else Config.model_construct(**sections)
    problems += [text for _, text in config.problems()] if config else []
    if config is None or problems:
        raise ConfigError(document.source, problems)
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


def _parse_override(text: str, problems: list[str]) -> tuple[str, Any] | None:
    key, equals, value = text.partition("=")
    if not equals or not 1 <= key.count(".") <= 2:
        problems.append(f"--set {text}: write it as section.field=value, such as trainer.lr=1e-3.")
        return None
    try:
        return key.strip(), parse_value(value)
    except (yaml.YAMLError, ValueError) as problem:
        problems.append(f"--set {text}: not a YAML value: {one_line(problem)}")
        return None


def _apply(pairs: list[tuple[str, Any]], values: dict[str, Any], problems: list[str]) -> None:
    for key, value in pairs:
        *parents, field = key.split(".")
        kinds = classes_of(parents[0]) if parents[0] in SECTIONS else []
        if len(parents) > 1 and kinds and not any(_has_fields(kind, parents[1]) for kind in kinds):
            problems.append(f"--set {key}: {'.'.join(parents)} is not a section.")
            continue
        target: Any = values
        for name in parents:
            if isinstance(target, dict):
                target[name] = {} if target.get(name) is None else target[name]
                target = target[name]
        if isinstance(target, dict):
            target[field] = value
        else:
            problems.append(f"--set {key}: {'.'.join(parents)} is not a section in this document.")


def _has_fields(kind: type[Section], field: str) -> bool:
    return subsection(kind, field) is not None or takes_any_name(kind, field)


def _build_sections(
    values: dict[str, Any], document: Document, problems: list[str], overridden: set[str], is_recorded: bool
) -> dict[str, Any]:
    """The valid sections; what is wrong is added to problems."""
    for name in values:
        if name not in SECTIONS and name != "schema_version":
            problems.append(f"{document.where((name,))}{_unknown((name,), 'section', SECTIONS)}")
    sections = {}
    for name in SECTIONS:
        fields = values.get(name)
        fields = {} if fields is None else fields
        if not isinstance(fields, dict):
            problems.append(f"{document.where((name,))}{name} must be a section with fields, got {_shown(fields)}.")
            continue
        kind = section_class(name, fields)
        if kind is None or (kind is CUSTOM.get(name) and not is_recorded and not _is_plugin(name, fields["name"])):
            where = "--set " if f"{name}.name" in overridden else document.where((name, "name"))
            problems.append(where + _unknown_kind(name, fields["name"]))
            continue
        section, errors = _build_section(kind, fields)
        for error in errors:
            path = (name, *(str(part) for part in error["loc"]))
            is_set = any(".".join(path[:depth]) in overridden for depth in (2, 3))
            where = "--set " if is_set else document.where(path[:3]) or document.where(path[:2])
            problems.append(where + _describe(path, error, kind))
        if section:
            bad = {str(error["loc"][0]) for error in errors if error["loc"]}
            problems.extend(text for concerned, text in section.problems() if not bad.intersection(concerned))
            sections[name] = section
    return sections


def _is_plugin(section: str, name: str) -> bool:
    return is_plugin(PLUGINS[f"{section}.name"], name)


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


def _shown(value: object) -> str:
    """An invalid value, shortened."""
    try:
        text = repr(value)
    except ValueError:  # 0xfff...: Python does not print integers of thousands of digits
        text = "an integer with thousands of digits"
    return text if len(text) <= SHOWN_LENGTH else f"{text[:SHOWN_LENGTH]}..."


def _describe(path: tuple[str, ...], error: ErrorDetails, kind: type[Section]) -> str:
    dotted = ".".join(path)
    if error["type"] == "extra_forbidden":
        inner = subsection(kind, path[1]) if len(path) > 2 else None
        return _unknown(path, "", (inner or kind).model_fields, None if inner else kind)
    if error["type"] == "missing":
        from llmtrain.config.reference import field_descriptions

        return f"{dotted} is required. {field_descriptions(kind).get(path[-1], '')}"
    message = error["msg"]
    if path[-1] == "run_id":
        message = "must be 2 to 40 lowercase letters, digits and hyphens, starting with a letter"
    return f"{dotted}: {message[0].lower()}{message[1:]}, got {_shown(error['input'])}."


def _unknown_kind(section: str, name: object) -> str:
    if not isinstance(name, str):
        return f"{section}.name must be text, got {_shown(name)}."
    known = [*KINDS[section], *installed_names(PLUGINS[f"{section}.name"])]
    return (
        f"{section}.name {_shown(name)} is unknown.{nearest(name, known)} Known: {', '.join(sorted(known))}, and "
        "package.module:Class for a class of your own."
    )


def _unknown(path: tuple[str, ...], what: str, known: Iterable[str], kind: type[Section] | None = None) -> str:
    """A section or field that does not exist: its current name, the kinds that have it, or the nearest name."""
    dotted = f"{what} '{path[0]}'" if what else ".".join(path)
    current = current_name(path)
    if current:
        return f"{dotted} is now {current}. Rename it, or write `schema_version: 2` to keep the old names."
    if kind is not None and kind is CUSTOM.get(path[0]):
        return (
            f"{dotted} is unknown. Known: {', '.join(sorted(known))}. Options of the class go into {path[0]}.options."
        )
    others = [name for name, each in KINDS.get(path[0], {}).items() if kind and path[-1] in each.model_fields]
    if others and kind:
        own = kind.model_fields["name"].default
        return f"{dotted} is not a field of {own}, only of {', '.join(others)}. Known: {', '.join(sorted(known))}."
    return f"{dotted} is unknown.{nearest(path[-1], known)} Known: {', '.join(sorted(known))}."
