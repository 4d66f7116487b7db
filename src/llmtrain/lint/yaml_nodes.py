"""YAML with line numbers. A plain loader forgets where a value stood, and a linter that cannot say where is of no use.

The tree is built from parse events, not by yaml.compose: that one recurses in C, and a file of nothing but `[` takes
the whole process down.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import yaml

MOST_LEVELS = 200
"""Of nesting. A manifest has some twenty."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SCALARS: Any = yaml.SafeLoader("")
_PARSERS = {
    "tag:yaml.org,2002:null": lambda node: None,  # noqa: ARG005
    "tag:yaml.org,2002:bool": _SCALARS.construct_yaml_bool,
    "tag:yaml.org,2002:int": _SCALARS.construct_yaml_int,
    "tag:yaml.org,2002:float": _SCALARS.construct_yaml_float,
}
# What only a chart has; other braces inside a text may be meant for another program (Vault, Argo), and stay.
_HELM = re.compile(r"\{\{-?\s*(?:\.Values|\.Release|\.Chart|include\s|toYaml\s)")


@dataclass(frozen=True)
class Source:
    """One file, for the lines of what is inside its long texts."""

    name: str
    lines: list[str]

    def find(self, part: str, first: int, last: int) -> int | None:
        """The number of the first line from `first` to `last` that has the part in it."""
        last = min(last, len(self.lines))
        at = self._text.find(part, self._starts[first - 1], self._starts[last]) if 0 < first <= last else -1
        return bisect_right(self._starts, at) if at >= 0 else None

    @cached_property
    def _text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)

    @cached_property
    def _starts(self) -> list[int]:
        """Where each line begins in the text, and where the text ends."""
        return list(accumulate((len(line) + 1 for line in self.lines), initial=0))


@dataclass(frozen=True)
class Node:
    """A value and the line of its key. What is missing is a Node too, with the value None and the line of the nearest
    thing around it: a finding about a missing field points to where it belongs."""

    value: Any
    """A scalar, a dictionary of Nodes or a list of Nodes."""
    line: int
    source: Source
    end: int = 0
    """Last line of a scalar."""

    def get(self, *path: str) -> "Node":
        here = self
        for key in path:
            found = here.value.get(key) if isinstance(here.value, dict) else None
            here = found if found is not None else Node(None, here.line, self.source)
        return here

    def __iter__(self) -> Iterator["Node"]:
        return iter(self.value if isinstance(self.value, list) else ())

    def items(self) -> Iterable[tuple[str, "Node"]]:
        return self.value.items() if isinstance(self.value, dict) else ()

    @property
    def exists(self) -> bool:
        return self.value is not None

    @property
    def text(self) -> str:
        """A scalar as text; of anything else nothing."""
        return "" if self.value is None or isinstance(self.value, dict | list) else str(self.value)

    @property
    def number(self) -> int | None:
        """A whole number, also one in quotes."""
        if isinstance(self.value, bool):
            return None
        return int(self.text) if re.fullmatch(r"\d{1,9}", self.text) else None

    def line_of(self, part: str, after: int = 0) -> int:
        """The line of a part of a long text; the line of the text itself where it cannot be told. Whoever asks for
        many, in their order, says after which line the next one stands: a long script is then read once."""
        first = part.strip().splitlines()[0] if part.strip() else ""
        end = max(self.line, self.end)
        found = self.source.find(first, max(self.line, after), end) if first else None
        if found is None and first and after > self.line:
            found = self.source.find(first, self.line, end)
        return self.line if found is None else found


class NotAManifest(Exception):
    """Why a file cannot be linted; `line` where it is known."""

    def __init__(self, why: str, line: int = 0) -> None:
        super().__init__(why)
        self.line = line


class _StrangeKey(NotAManifest):
    """YAML allows it, Kubernetes does not; `name: {{ x }}` reads like it."""

    def __init__(self, line: int) -> None:
        super().__init__("not YAML for Kubernetes: a key is a list or mapping", line)


def parse(text: str, name: str) -> list[Node]:
    """The documents of a text, empty ones left out."""
    source = Source(name, text.splitlines())
    if found := _HELM.search(text):
        raise _helm(text, found.start())
    loader = None
    try:
        loader = _LOADER(text)
        return [node for node in _documents(loader, source) if node.exists]
    except (yaml.YAMLError, _StrangeKey) as error:
        if (at := text.find("{{")) >= 0:
            raise _helm(text, at) from None
        raise error if isinstance(error, NotAManifest) else _broken(error) from None
    finally:
        if loader is not None:
            loader.dispose()


def _helm(text: str, at: int) -> NotAManifest:
    remedy = "lint what it renders: `helm template CHART | llmtrain lint -`"
    return NotAManifest(f"this is a template ({{{{ }}}}), not YAML; {remedy}", text.count("\n", 0, at) + 1)


def _broken(error: yaml.YAMLError) -> NotAManifest:
    mark = getattr(error, "problem_mark", None)
    why = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
    return NotAManifest(f"not YAML: {why}", mark.line + 1 if mark else 0)


@dataclass
class _Open:
    """A list or mapping that is being read."""

    value: Any
    line: int
    anchor: str | None
    key: tuple[str, int] | None = None
    """The key whose value comes next, and its line."""
    merged: list[Node] = field(default_factory=list)


class _Builder:
    """Puts the values of parse events together. A value of a mapping gets the line of its key."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.stack: list[_Open] = []
        self.anchors: dict[str, Any] = {}
        self.done: list[Node] = []
        """Documents that are complete."""

    def open(self, value: Any, anchor: str | None, line: int) -> None:
        if len(self.stack) >= MOST_LEVELS:
            raise NotAManifest(f"nested more than {MOST_LEVELS} levels deep", line)
        if self.stack and isinstance(self.stack[-1].value, dict) and self.stack[-1].key is None:
            raise _StrangeKey(line)
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
            raise NotAManifest("an alias inside its own anchor", line)
        self._put(Node(self.anchors[anchor], self._line(line), self.source, line))

    def _remember(self, anchor: str | None, value: Any) -> None:
        if anchor:
            self.anchors[anchor] = value

    def _line(self, line: int) -> int:
        key = self.stack[-1].key if self.stack else None
        return key[1] if key else line

    def _put(self, node: Node, raw: str | None = None) -> None:
        """Into what is open; a node on its own is a document."""
        if not self.stack:
            self.done.append(node)
            return
        inside = self.stack[-1]
        if isinstance(inside.value, list):
            inside.value.append(node)
        elif inside.key is None:
            inside.key = (raw if raw is not None else node.text, node.line)
        else:
            if inside.key[0] == "<<":
                inside.merged.extend(node if isinstance(node.value, list) else [node])
            else:
                inside.value[inside.key[0]] = node
            inside.key = None


def _documents(loader: Any, source: Source) -> list[Node]:
    built = _Builder(source)
    while loader.check_event():
        event: Any = loader.get_event()
        kind, line = type(event), event.start_mark.line + 1
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
    if tag is None or tag == "!":
        tag = loader.resolve(yaml.ScalarNode, event.value, event.implicit)
    # YAML 1.1 reads 1:4 as 64; Kubernetes does not.
    parser = None if ":" in event.value else _PARSERS.get(tag)
    try:
        return parser(yaml.ScalarNode(tag, event.value)) if parser else event.value
    except (ValueError, KeyError, OverflowError):
        return event.value
