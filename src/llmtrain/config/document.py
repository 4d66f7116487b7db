"""YAML documents: `1e-3` is a number, a duplicate key is an error, and the line of each key is known."""

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from llmtrain.config.yaml_errors import explain_yaml_error
from llmtrain.errors import ConfigError, UsageError

KeyPath = tuple[str, ...]
MAX_LEVELS = 50
"""Maximum depth of nesting. A config has four levels, plus those of Kubernetes syntax in `launch`."""
MAX_VALUES = 100_000
"""Maximum number of values of a document; a config may list thousands of files."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 numbers: PyYAML reads 1e-3 as text, and 2:4 as the sexagesimal number 124."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node)
            if not isinstance(key, Hashable):
                continue  # the base class refuses it
            if key in keys:
                line = key_node.start_mark.line + 1
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key '{key}' at line {line}", key_node.start_mark
                )
            keys.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in rows if tag not in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int")]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = (
    r"^(?:[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)"
    r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


_INT = r"^(?:[-+]?0b[0-1_]+|[-+]?0[0-7_]+|[-+]?(?:0|[1-9][0-9_]*)|[-+]?0x[0-9a-fA-F_]+)$"
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+0123456789."))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(_INT), list("-+0123456789"))


class _Dumper(yaml.SafeDumper):
    """Quotes text that the loader above would read as a number."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


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
        return f"{self.file}:{self.line}:" if self.file else f"line {self.line}:"


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
        return Place(line) if line else self.inherited.get(path)


def read_document(path: Path) -> Document:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"Config file {path} does not exist.",
            remedy="Pass a file, or the name of a preset; `llmtrain presets` lists them.",
        ) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"Config file {path} cannot be read: {problem}.") from None
    return parse_document(text, str(path))


def parse_document(text: str, source: str) -> Document:
    try:
        node, values = _load(text)
    except (yaml.YAMLError, ValueError) as problem:
        what, line = explain_yaml_error(problem, text)
        raise ConfigError(source, [f"not valid YAML: {what}"], line) from None
    if values is None:
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(source, ["the document must be a mapping of sections, such as `model:`"])
    lines: dict[KeyPath, int] = {}
    _note_lines(node, (), lines)
    return Document(source, values, lines)


def parse_value(text: str) -> Any:
    """The value of `--set field=TEXT`, parsed as YAML, so that it has the type it would have in a file."""
    return _load(text)[1]


def _load(text: str) -> tuple[yaml.Node | None, Any]:
    """The node tree of a text, and its value. Raises ValueError if it is too deep or too large."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _measure(node, {}, 0)
        return node, loader.construct_document(node)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_LEVELS} levels deep") from None
    finally:
        loader.dispose()


def _measure(node: yaml.Node, known: dict[int, int | None], level: int) -> int:
    """Number of values of a tree with its aliases expanded: nine lines of aliases can expand to a billion values."""
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise ValueError("a value refers to itself")
        return size
    if level > MAX_LEVELS:
        raise ValueError(f"nested more than {MAX_LEVELS} levels deep")
    known[id(node)] = None
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    size = 1 + sum(_measure(child, known, level + 1) for child in children)
    if size > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES:,} values, with aliases expanded")
    known[id(node)] = size
    return size


def _note_lines(node: yaml.Node | None, path: KeyPath, lines: dict[KeyPath, int]) -> None:
    """Record the lines of sections, of their fields, and of the fields of subsections."""
    if isinstance(node, yaml.MappingNode) and len(path) < 3:
        for key, value in node.value:
            here = (*path, str(key.value))
            lines[here] = key.start_mark.line + 1
            _note_lines(value, here, lines)
