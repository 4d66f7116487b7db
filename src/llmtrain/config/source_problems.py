"""What is wrong with the sources of a mixture, each described as a data section of its own would be."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import ValidationError

from llmtrain.config.document import KeyPath
from llmtrain.config.mixture import SHARED_FIELDS, SourceSection
from llmtrain.config.problems import describe_error, describe_unknown_kind, shown
from llmtrain.config.schema import SECTIONS_BY_NAME, section_class
from llmtrain.config.section import Section
from llmtrain.errors import nearest

CheckSection = Callable[[type[Section], dict[str, Any]], Iterator[tuple[KeyPath, str]]]
"""The path in a data section and the text of each problem that a class has with these values."""
_SECTION_FIELD = re.compile(rf"\bdata\.(?!{'|'.join((*SHARED_FIELDS, 'sources', 'stages'))}\b)")


def source_problems(
    sources: list[Any], check: CheckSection, is_plugin: Callable[[str], bool]
) -> Iterator[tuple[KeyPath, str]]:
    """(path, text) of each problem. `check`: what finds the problems of a data section."""
    for index, values in enumerate(sources):
        path = ("data", "sources", str(index))
        if not isinstance(values, dict):
            yield path, f"{'.'.join(path)} must be a section with fields, got {shown(values)}."
            continue
        for below, text in _problems(values, check, is_plugin):
            yield (*path, *below), of_source(text, index)


def of_source(text: str, index: int) -> str:
    """A message about a data section, with the names that its fields have in a mixture."""
    return _SECTION_FIELD.sub(f"data.sources.{index}.", text)


def _problems(
    values: dict[str, Any], check: CheckSection, is_plugin: Callable[[str], bool]
) -> Iterator[tuple[KeyPath, str]]:
    own = {name: value for name, value in values.items() if name in SourceSection.model_fields}
    yield from _own_problems(own)
    fields = {name: value for name, value in values.items() if name not in own}
    for name in SHARED_FIELDS:
        if name in fields:
            del fields[name]
            yield (name,), f"{name} of a source belongs to the mixture. Remove it, and set data.{name}."
    if fields.get("name") == "mixture":
        yield ("name",), "data.name: a source cannot be a mixture. List its sources here."
        return
    kind = section_class("data", fields) if "name" in fields else None
    if kind is None or (fields["name"] not in SECTIONS_BY_NAME["data"] and not is_plugin(fields["name"])):
        yield ("name",), describe_unknown_kind("data", {"name": fields.get("name")})[1]
        return
    for name in [name for name in fields if name not in kind.model_fields]:
        similar = nearest(name, [*SourceSection.model_fields, *kind.model_fields])
        if any(repr(field) in similar for field in SourceSection.model_fields):
            del fields[name]
            yield (name,), f"data.{name} is unknown.{similar}"
    for path, text in check(kind, fields):
        yield path[1:], text


def _own_problems(own: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Those of the fields that only sources have."""
    try:
        SourceSection.model_validate({"name": "dummy_text", **own})
    except ValidationError as error:
        for each in error.errors(include_url=False):
            path = tuple(map(str, each["loc"]))
            if each["type"] == "missing":
                yield path, f"data.{path[0]} is required. The shares of the sources follow from their weights."
                continue
            text = describe_error(("data", *path), each, SourceSection, own.get(path[0]))
            if path == ("weight",) and each["input"] == 0:
                text += " Remove a source that is not to be read; a weight in data.stages may be 0."
            yield path, text
