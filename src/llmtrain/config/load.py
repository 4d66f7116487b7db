"""load_config: a file or preset, plus overrides, to one frozen Config; every problem is reported at once."""

import copy
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llmtrain.config.document import Document, dump_document, parse_value, read_document
from llmtrain.config.launch import LaunchSection
from llmtrain.config.schema import SCHEMA_VERSION, SECTIONS, Config, Section, subsection, takes_any_name
from llmtrain.config.upgrade import upgrade_v1
from llmtrain.env import WORKER
from llmtrain.errors import ConfigError, UsageError, nearest
from llmtrain.text import one_line

DEFAULT_PRESET = "gpt_stdlib"
SHOWN_LENGTH = 200


def load_config(source: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Load a config file or a preset by name (default: gpt_stdlib) and apply `section.field=value` overrides."""
    document = read_document(find_config(source if source is not None else DEFAULT_PRESET))
    notes: list[str] = []
    config = build_config(document, overrides, notes)
    if notes and os.environ.get("RANK", "0") == "0" and os.environ.get(WORKER) != "1":  # one voice
        print(f"note: {document.source} is read as schema_version 1: {', '.join(notes)}.", file=sys.stderr)
    return config


def build_config(
    document: Document,
    overrides: Sequence[str] = (),
    notes: list[str] | None = None,
    *,
    is_launched: bool = False,
) -> Config:
    """The config of a parsed document; what an upgrade of an older one filled in is added to `notes`. `is_launched`: it
    is that of a run on a cluster, and a secret in it is no reason to refuse it any more."""
    values = copy.deepcopy(document.values)
    problems: list[str] = []
    version = values.get("schema_version", SCHEMA_VERSION)
    if isinstance(version, bool):
        version = str(version)  # True == 1 in Python, but not in a config
    pairs = [_parse_override(text, problems) for text in overrides]
    given = [pair for pair in pairs if pair]
    if version == 1:
        _apply([pair for pair in given if pair[0].startswith("ddp.")], values, problems)
        given = [pair for pair in given if not pair[0].startswith("ddp.")]
        if "distributed" in values and "ddp" in values:
            problems.append("ddp and distributed are the same section; a version-1 document has ddp only.")
        data_name = dict(given).get("data.name")
        values, filled = upgrade_v1(values, data_name if isinstance(data_name, str) else None)
        values["schema_version"] = SCHEMA_VERSION
        if notes is not None:
            set_fields = {key for key, _ in given}
            notes += [note for field, note in filled.items() if field not in set_fields]
        document = document.renamed("ddp", "distributed")
    elif version != SCHEMA_VERSION:
        problems.append(f"schema_version {_shown(version)} is unknown. Known: 1, {SCHEMA_VERSION}.")
        values["schema_version"] = SCHEMA_VERSION
    elif "ddp" in values:
        problems.append("ddp is the version-1 name of distributed. Rename it, or write schema_version: 1.")
        del values["ddp"]
    _apply(given, values, problems)
    sections = _build_sections(values, document, problems, {key for key, _ in given})
    launch = sections.get("launch")
    if isinstance(launch, LaunchSection) and not is_launched:
        problems += [text for _, text in launch.secret_problems()]
    config = None if problems else Config.model_validate(sections)
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
    folder = next(d for d in (package / "presets", package.parents[1] / "configs" / "presets") if d.is_dir())
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


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
        kind = SECTIONS.get(parents[0])
        if len(parents) > 1 and kind and not subsection(kind, parents[1]) and not takes_any_name(kind, parents[1]):
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


def _build_sections(
    values: dict[str, Any], document: Document, problems: list[str], overridden: set[str]
) -> dict[str, Section]:
    """Every section that is right; what is wrong goes to problems."""
    for name in values:
        if name not in SECTIONS and name != "schema_version":
            problems.append(
                f"{document.where((name,))}section '{name}' is unknown.{nearest(name, SECTIONS)} "
                f"Known: {', '.join(sorted(SECTIONS))}."
            )
    sections = {}
    for name, kind in SECTIONS.items():
        given = values.get(name)
        given = {} if given is None else given
        if not isinstance(given, dict):
            problems.append(f"{document.where((name,))}{name} must be a section with fields, not {_shown(given)}.")
            continue
        section, wrong = _build_section(kind, given)
        for error in wrong:
            path = (name, *(str(part) for part in error["loc"]))
            is_set = any(".".join(path[:depth]) in overridden for depth in (2, 3))
            where = "--set " if is_set else document.where(path[:3]) or document.where(path[:2])
            problems.append(where + _say(path, error, kind))
        if section:
            bad = {str(error["loc"][0]) for error in wrong if error["loc"]}
            problems.extend(text for fields, text in section.problems() if not bad.intersection(fields))
            sections[name] = section
    return sections


def _build_section(kind: type[Section], given: dict[str, Any]) -> tuple[Section | None, list[ErrorDetails]]:
    """The section without its wrong fields (so that what is left can be checked too), and what was wrong."""
    try:
        return kind(**given), []
    except ValidationError as error:
        wrong = error.errors(include_url=False)
    except TypeError:  # a key that is not a string
        raise ConfigError(kind.__name__, ["field names must be text"]) from None
    bad = {str(row["loc"][0]) for row in wrong if row["loc"]}
    try:
        return kind(**{key: value for key, value in given.items() if key not in bad}), wrong
    except ValidationError:
        return None, wrong


def _shown(value: object) -> str:
    """A wrong value, as far as it helps."""
    try:
        text = repr(value)
    except ValueError:  # 0xfff...: Python does not write out whole numbers of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= SHOWN_LENGTH else f"{text[:SHOWN_LENGTH]}..."


def _say(path: tuple[str, ...], error: ErrorDetails, kind: type[Section]) -> str:
    dotted = ".".join(path)
    if error["type"] == "extra_forbidden":
        fields = subsection(kind, path[1]) if len(path) > 2 else kind
        known = (fields or kind).model_fields
        return f"{dotted} is unknown.{nearest(path[-1], known)} Known: {', '.join(sorted(known))}."
    message = error["msg"]
    if path[-1] == "run_id" or path == ("launch", "name"):
        message = "use 2 to 40 lower-case letters, digits and hyphens, starting with a letter"
    return f"{dotted}: {message[0].lower()}{message[1:]}, but it is {_shown(error['input'])}."
