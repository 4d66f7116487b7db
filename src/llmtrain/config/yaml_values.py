"""YAML text as values: `1e-3` is a number, a duplicate key is an error, and every error has a line."""

import re
from collections.abc import Collection, Hashable
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.resolver import Resolver

from llmtrain.core import libyaml
from llmtrain.core.text import one_line

MAX_LEVELS = 50
"""Maximum depth of nesting. A config has four levels, plus those of Kubernetes syntax in `launch`."""
MAX_VALUES = 100_000
"""Maximum number of values of a document; a config may list thousands of files."""
_TAG = "tag:yaml.org,2002:"


def load_yaml(text: str) -> tuple[yaml.Node | None, Any]:
    """The node tree of a text, and its value. Raises YAMLError, or ValueError if it is too deep or too large."""
    return _load(yaml.SafeLoader, text)


def load_dumped(text: str, skipped: Collection[str] = ()) -> Any:
    """The value of a text that `dump_document` wrote. libyaml parses it ten times faster; it is not used for what
    people write, because it accepts some tabs and its errors say less. `skipped`: keys of the document whose values
    are only checked for syntax, and are None here."""
    return _load(libyaml.Loader, text, skipped)[1]


class _Composer(Composer, Resolver):
    """Nodes from the events of a parser. (That of libyaml composes in C, where deep nesting overflows the stack.)"""

    def __init__(self, parser: Any, skipped: Collection[str]) -> None:
        Composer.__init__(self)
        Resolver.__init__(self)
        self.check_event = parser.check_event
        self.get_event = parser.get_event
        self.peek_event = parser.peek_event
        self._skipped = skipped
        self._level = 0
        self._count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Stops where a document becomes too large: PyYAML reads about 40,000 values per second."""
        self._count += 1
        if self._count > MAX_VALUES:
            raise _too_large()
        if self._level == 1 and isinstance(index, yaml.ScalarNode) and index.value in self._skipped:
            return self._skip_node()
        _check_level(self._level)
        self._level += 1
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def _skip_node(self) -> yaml.Node:
        start = self.peek_event().start_mark
        level = 0
        while True:
            event = self.get_event()
            if isinstance(event, yaml.CollectionStartEvent):
                level += 1
                _check_level(self._level + level)
            elif isinstance(event, yaml.CollectionEndEvent):
                level -= 1
            if level == 0:
                return yaml.ScalarNode(f"{_TAG}null", "", start, start)


class _Constructor(SafeConstructor):
    """SafeConstructor without duplicate keys, and whose errors all have a line."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception:  # of int(), float() and tables: PyYAML expects that an explicit tag fits its value
            value = "the value"
            if isinstance(node.value, str):
                value = f"'{one_line(node.value, 40)}'"
            tag = node.tag.replace(_TAG, "!!")
            raise ConstructorError(None, None, f"{value} is not a valid {tag}", node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)
        return super().construct_mapping(node, deep)

    def _check_keys(self, node: yaml.MappingNode) -> None:
        keys: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == f"{_TAG}merge":
                continue
            key = self.construct_object(key_node)
            if not isinstance(key, Hashable):
                continue  # the base class refuses it
            if key in keys:
                name = one_line(key_node.value, 40)
                line = key_node.start_mark.line + 1
                raise ConstructorError(None, None, f"duplicate key '{name}' at line {line}", key_node.start_mark)
            keys.add(key)


# YAML 1.2 numbers: PyYAML reads 1e-3 as text, and 2:4 as the sexagesimal number 124.
_FLOAT = (
    r"^(?:[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)"
    r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_INT = r"^(?:[-+]?0b[0-1_]+|[-+]?0[0-7_]+|[-+]?(?:0|[1-9][0-9_]*)|[-+]?0x[0-9a-fA-F_]+)$"
_Composer.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in rows if tag not in (f"{_TAG}float", f"{_TAG}int")]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Composer.add_implicit_resolver(f"{_TAG}float", re.compile(_FLOAT), list("-+0123456789."))
_Composer.add_implicit_resolver(f"{_TAG}int", re.compile(_INT), list("-+0123456789"))


IMPLICIT_RESOLVERS = _Composer.yaml_implicit_resolvers
"""Which plain text is what: a dumper with these quotes text that would be read as a number."""


def _load(parser_class: Any, text: str, skipped: Collection[str] = ()) -> tuple[yaml.Node | None, Any]:
    parser = parser_class(text)
    try:
        node = _Composer(parser, skipped).get_single_node()
        if node is None:
            return None, None
        _measure(node, {}, 0)
        return node, _Constructor().construct_document(node)
    finally:
        parser.dispose()


def _check_level(level: int) -> None:
    if level > MAX_LEVELS:
        raise ValueError(f"nested more than {MAX_LEVELS} levels deep")


def _too_large() -> ValueError:
    return ValueError(f"more than {MAX_VALUES:,} values, with aliases expanded")


def _measure(node: yaml.Node, known: dict[int, int | None], level: int) -> int:
    """Number of values of a tree with its aliases expanded: nine lines of aliases can expand to a billion values."""
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise ValueError("a value refers to itself")
        return size
    _check_level(level)  # again: an alias may stand for a deep value
    known[id(node)] = None
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    size = 1 + sum(_measure(child, known, level + 1) for child in children)
    if size > MAX_VALUES:
        raise _too_large()
    known[id(node)] = size
    return size
