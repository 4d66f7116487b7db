"""Config documents: YAML of which the line of each key is known. Documents of earlier schemas: compat/upgrade.py."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from llmtrain.config.yaml_errors import explain_yaml_error
from llmtrain.config.yaml_values import IMPLICIT_RESOLVERS, load_dumped, load_yaml
from llmtrain.core import libyaml
from llmtrain.errors import ConfigError, UsageError

KeyPath = tuple[str, ...]


class _Dumper(libyaml.Dumper):  # type: ignore[misc]
    """Quotes text that would be read as a number."""


_Dumper.yaml_implicit_resolvers = IMPLICIT_RESOLVERS


def dump_document(values: dict[str, Any]) -> str:
    """YAML that loads as the same values, in the same order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=120)


class Place(NamedTuple):
    """Where a key is written."""

    line: int
    file: str | None = None
    """None: in the document itself, else in a base that it extends."""

    @property
    def is_inherited(self) -> bool:
        return self.file is not None

    def __str__(self) -> str:
        if self.file:
            return f"{self.file}:{self.line}:"
        return f"line {self.line}:"


@dataclass
class Document:
    """A parsed config file: its values, and the line number of each key."""

    source: str
    values: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    inherited: dict[KeyPath, Place] = field(default_factory=dict)
    """Places of the keys of its bases (see extends.py)."""

    def place(self, path: KeyPath) -> Place | None:
        line = self.lines.get(path)
        if line:
            return Place(line)
        return self.inherited.get(path)


def read_document(path: Path) -> Document:
    return parse_document(_read_text(path), str(path))


def read_dumped(path: Path, skipped: Collection[str] = ()) -> dict[str, Any]:
    """The values of a file that dump_document wrote, faster than read_document. `skipped`: sections that are not
    needed and are None here."""
    return parse_dumped(_read_text(path), str(path), skipped)


def parse_dumped(text: str, source: str, skipped: Collection[str] = ()) -> dict[str, Any]:
    """The values of a text that dump_document wrote, faster than parse_document."""
    try:
        values = load_dumped(text, skipped)
    except (yaml.YAMLError, ValueError):  # damaged, or edited since: an alias may refer to a skipped section
        return parse_document(text, source).values
    return _as_mapping(values, source)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"Config file {path} does not exist.",
            remedy="Pass a file, or the name of a preset; `llmtrain presets` lists them.",
        ) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"Config file {path} cannot be read: {problem}.") from None


def parse_document(text: str, source: str) -> Document:
    try:
        node, values = load_yaml(text)
    except (yaml.YAMLError, ValueError) as problem:
        what, line = explain_yaml_error(problem, text)
        raise ConfigError(source, [f"not valid YAML: {what}"], line) from None
    lines: dict[KeyPath, int] = {}
    _note_lines(node, (), lines)
    return Document(source, _as_mapping(values, source), lines)


def _as_mapping(values: Any, source: str) -> dict[str, Any]:
    """The values of a whole document, which must be a mapping or empty."""
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(source, ["the document must be a mapping of sections, such as `model:`"])
    return values


def parse_value(text: str) -> Any:
    """The value of `--set field=TEXT`, parsed as YAML, so that it has the type it would have in a file."""
    return load_yaml(text)[1]


def _note_lines(node: yaml.Node | None, path: KeyPath, lines: dict[KeyPath, int]) -> None:
    """Record the lines of sections, of their fields, and of the fields of subsections."""
    if isinstance(node, yaml.MappingNode) and len(path) < 3:
        for key, value in node.value:
            here = (*path, str(key.value))
            lines[here] = key.start_mark.line + 1
            _note_lines(value, here, lines)


MISSING: Any = object()


def value_at(values: dict[str, Any], path: KeyPath) -> Any:
    """The value at a path; None if there is none."""
    found: Any = values
    for name in path:
        if not isinstance(found, dict):
            return None
        found = found.get(name)
    return found


def take_value(values: dict[str, Any], path: KeyPath) -> Any:
    """Remove the value at a path and return it; MISSING if there is none."""
    parent = value_at(values, path[:-1])
    if isinstance(parent, dict):
        return parent.pop(path[-1], MISSING)
    return MISSING


def put_value(values: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Set the value at a path; nothing if something else than a section is in the way (the schema refuses that)."""
    target: Any = values
    for name in path[:-1]:
        if not isinstance(target, dict):
            return
        if target.get(name) is None:
            target[name] = {}
        target = target[name]
    if isinstance(target, dict):
        target[path[-1]] = value
