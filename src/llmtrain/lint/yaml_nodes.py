"""YAML values with line numbers.

The tree is built from parse events, not by yaml.compose, which recurses in C: a file of nothing but `[` would crash the
process.
"""

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import yaml

from llmtrain.core import libyaml

MAX_DEPTH = 200
"""Levels of nesting. A manifest has about twenty."""
_SCALARS: Any = yaml.SafeLoader("")
_PARSERS = {
    "tag:yaml.org,2002:null": lambda node: None,  # noqa: ARG005
    "tag:yaml.org,2002:bool": _SCALARS.construct_yaml_bool,
    "tag:yaml.org,2002:int": _SCALARS.construct_yaml_int,
    "tag:yaml.org,2002:float": _SCALARS.construct_yaml_float,
}
# A number in Kubernetes and YAML 1.2, a string in YAML 1.1.
_EXPONENT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+")
# Only Helm charts contain these; other braces may belong to another program (Vault, Argo).
_HELM = re.compile(r"\{\{-?\s*(?:\.Values|\.Release|\.Chart|include\s|toYaml\s)")


@dataclass(frozen=True)
class Source:
    """One file, to find the lines of parts of its multi-line strings."""

    name: str
    lines: list[str]

    def offset(self, line: int) -> int:
        """Where a line begins in the text, or where the text ends."""
        return self._starts[min(max(line - 1, 0), len(self.lines))]

    def find(self, part: str, start: int, end: int) -> int:
        """The offset of the first occurrence between two offsets, or -1."""
        return self._text.find(part, start, end)

    def line_at(self, offset: int) -> int:
        return bisect_right(self._starts, offset)

    @cached_property
    def _text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)

    @cached_property
    def _starts(self) -> list[int]:
        """Offset of each line, and of the end of the text."""
        return list(accumulate((len(line) + 1 for line in self.lines), initial=0))


@dataclass(frozen=True)
class Node:
    """A value and the line of its key. A missing field is a Node with the value None and the line of its parent, so
    that findings about it have a line."""

    value: Any
    """A scalar, a dict of Nodes or a list of Nodes."""
    line: int
    source: Source
    end: int = 0
    """Last line of a scalar."""

    def get(self, *path: str) -> "Node":
        here = self
        for key in path:
            found = None
            if isinstance(here.value, dict):
                found = here.value.get(key)
            if found is None:
                found = Node(None, here.line, self.source)
            here = found
        return here

    def __iter__(self) -> Iterator["Node"]:
        """The entries of a list; nothing for anything else."""
        if isinstance(self.value, list):
            yield from self.value

    def items(self) -> Collection[tuple[str, "Node"]]:
        """The fields of a mapping; nothing for anything else."""
        if isinstance(self.value, dict):
            return self.value.items()
        return ()

    @property
    def exists(self) -> bool:
        return self.value is not None

    @property
    def text(self) -> str:
        """A scalar as text; empty for anything else."""
        if self.value is None or isinstance(self.value, dict | list):
            return ""
        return str(self.value)

    @property
    def number(self) -> int | None:
        """An integer, also if it is quoted."""
        if isinstance(self.value, bool) or not re.fullmatch(r"\d{1,9}", self.text):
            return None
        return int(self.text)

    def line_of(self, part: str) -> int:
        """The line of a part of a multi-line string; the line of the string itself if it is not found."""
        return LineFinder(self).line_of(part)


class LineFinder:
    """Finds the lines of many parts of a string, in their order. Each search continues after the previous match, so
    that a long script is read only once."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._start = self._next = node.source.offset(node.line)
        self._end = node.source.offset(max(node.line, node.end) + 1)
        self._missing: set[str] = set()

    def line_of(self, part: str) -> int:
        """The line of a part; the line of the string itself if it is not found."""
        first = next(iter(part.strip().splitlines()), "")
        if not first or first in self._missing:
            return self._node.line
        source = self._node.source
        at = source.find(first, self._next, self._end)
        if at < 0:  # an earlier search went too far, e.g. into a comment
            at = source.find(first, self._start, self._end)
        if at < 0:
            self._missing.add(first)
            return self._node.line
        self._next = max(self._next, at + len(first))
        return source.line_at(at)


class NotAManifest(Exception):
    """Why a file cannot be linted, and the line if known."""

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.line = line


class _ComplexKey(NotAManifest):
    """Valid in YAML, but not in Kubernetes; a template such as `name: {{ x }}` is parsed as one."""

    def __init__(self, line: int) -> None:
        super().__init__("not valid for Kubernetes: a key is a list or mapping", line)


def parse(text: str, name: str) -> list[Node]:
    """The non-empty documents of a text."""
    source = Source(name, text.splitlines())
    if found := _HELM.search(text):
        raise _helm(text, found.start())
    loader = None
    try:
        loader = libyaml.Loader(text)
        return [node for node in _documents(loader, source) if node.exists]
    except (yaml.YAMLError, _ComplexKey) as error:
        at = text.find("{{")
        if at >= 0:
            raise _helm(text, at) from None
        if isinstance(error, NotAManifest):
            raise
        raise _invalid(error) from None
    finally:
        if loader is not None:
            loader.dispose()


def _helm(text: str, at: int) -> NotAManifest:
    remedy = "lint its output: `helm template CHART | llmtrain lint -`"
    return NotAManifest(f"a template ({{{{ }}}}), not YAML; {remedy}", text.count("\n", 0, at) + 1)


def _invalid(error: yaml.YAMLError) -> NotAManifest:
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
    line = 0
    if mark:
        line = mark.line + 1
    return NotAManifest(f"not YAML: {reason}", line)


@dataclass
class _Open:
    """A list or mapping that is not closed yet."""

    value: Any
    line: int
    anchor: str | None
    key: tuple[str, int] | None = None
    """The key whose value follows, and its line."""
    merged: list[Node] = field(default_factory=list)


class _Builder:
    """Builds Nodes from parse events. The value of a mapping has the line of its key."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.stack: list[_Open] = []
        self.anchors: dict[str, Any] = {}
        self.done: list[Node] = []
        """Complete documents."""

    def open(self, value: Any, anchor: str | None, line: int) -> None:
        if len(self.stack) >= MAX_DEPTH:
            raise NotAManifest(f"nested more than {MAX_DEPTH} levels deep", line)
        if self.stack and isinstance(self.stack[-1].value, dict) and self.stack[-1].key is None:
            raise _ComplexKey(line)
        self.stack.append(_Open(value, self._line(line), anchor))
        self._remember(anchor, value)

    def close(self) -> None:
        done = self.stack.pop()
        for node in done.merged:
            for key, value in node.items():
                done.value.setdefault(key, value)
        self._put(Node(done.value, done.line, self.source))

    def scalar(self, value: Any, raw: str, anchor: str | None, line: int, end: int) -> None:
        self._remember(anchor, value)
        self._put(Node(value, self._line(line), self.source, end), raw)

    def alias(self, anchor: str, line: int) -> None:
        if anchor not in self.anchors:
            raise NotAManifest(f"not YAML: no anchor {anchor}", line)
        if any(opened.anchor == anchor for opened in self.stack):
            raise NotAManifest("not YAML: an alias inside its own anchor", line)
        self._put(Node(self.anchors[anchor], self._line(line), self.source, line))

    def _remember(self, anchor: str | None, value: Any) -> None:
        if anchor:
            self.anchors[anchor] = value

    def _line(self, line: int) -> int:
        """The line of the key before a value, else that of the value itself."""
        if not self.stack or self.stack[-1].key is None:
            return line
        _, line_of_key = self.stack[-1].key
        return line_of_key

    def _put(self, node: Node, raw: str | None = None) -> None:
        """Add a node to the open list or mapping; a top-level node is a document."""
        if not self.stack:
            self.done.append(node)
            return
        inside = self.stack[-1]
        if isinstance(inside.value, list):
            inside.value.append(node)
        elif inside.key is None:
            key = node.text
            if raw is not None:  # as it is written: the key 1e3 is not "1000.0"
                key = raw
            inside.key = (key, node.line)
        else:
            key, _ = inside.key
            inside.key = None
            if key != "<<":
                inside.value[key] = node
            elif isinstance(node.value, list):
                inside.merged.extend(node)
            else:
                inside.merged.append(node)


def _documents(loader: Any, source: Source) -> list[Node]:
    built = _Builder(source)
    while loader.check_event():
        event: Any = loader.get_event()
        kind = type(event)
        line = event.start_mark.line + 1
        if kind is yaml.DocumentStartEvent:
            built.anchors = {}
        elif kind is yaml.MappingStartEvent:
            built.open({}, event.anchor, line)
        elif kind is yaml.SequenceStartEvent:
            built.open([], event.anchor, line)
        elif kind in (yaml.MappingEndEvent, yaml.SequenceEndEvent):
            built.close()
        elif kind is yaml.ScalarEvent:
            built.scalar(_scalar(loader, event), event.value, event.anchor, line, event.end_mark.line + 1)
        elif kind is yaml.AliasEvent:
            built.alias(event.anchor, line)
    return built.done


def _scalar(loader: Any, event: Any) -> Any:
    tag = event.tag
    if tag is None and event.implicit[0] and _EXPONENT.fullmatch(event.value):
        return float(event.value)
    if tag is None or tag == "!":
        tag = loader.resolve(yaml.ScalarNode, event.value, event.implicit)
    if tag not in _PARSERS or ":" in event.value:  # in YAML 1.1, but not in Kubernetes, 1:4 is the number 64
        return event.value
    try:
        return _PARSERS[tag](yaml.ScalarNode(tag, event.value))
    except (ValueError, KeyError, OverflowError):
        return event.value
