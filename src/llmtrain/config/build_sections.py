"""The sections of a document, each checked alone: what is wrong is collected with its place."""

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llmtrain.config.document import KeyPath
from llmtrain.config.mixture import MixtureSection
from llmtrain.config.problems import (
    Problems,
    describe_error,
    describe_unknown,
    describe_unknown_kind,
    describe_unknown_objective,
    shown,
)
from llmtrain.config.schema import PLUGIN_SECTIONS, SECTIONS, section_class, subsections
from llmtrain.config.section import Section
from llmtrain.config.source_problems import source_problems
from llmtrain.errors import ConfigError
from llmtrain.plugins import is_plugin
from llmtrain.registry import PLUGINS


def build_sections(values: dict[str, Any], problems: Problems, is_recorded: bool) -> dict[str, Any]:
    """The valid sections; what is wrong is added to problems."""
    for name in values:
        if not isinstance(name, str):
            problems.add(f"names of sections must be text, got {shown(name)}.")
        elif name not in SECTIONS and name != "schema_version":
            problems.add(describe_unknown((name,), SECTIONS, None), (name,))
    sections = {}
    for name in SECTIONS:
        fields = values.get(name)
        if fields is None:
            fields = {}
        if not isinstance(fields, dict):
            problems.add(f"{name} must be a section with fields, got {shown(fields)}.", (name,))
            continue
        kind = section_class(name, fields)
        is_plugin_section = kind is not None and kind is PLUGIN_SECTIONS.get(name)
        if is_plugin_section and not is_recorded and not is_plugin(PLUGINS[f"{name}.name"], fields["name"]):
            kind = None
        if kind is None:
            field, text = describe_unknown_kind(name, fields)
            problems.add(text, (name, field))
            continue
        if kind is MixtureSection:
            fields = _without_bad_sources(fields, problems, is_recorded)
        unknown = None if is_recorded else describe_unknown_objective(kind, fields.get("objective"))
        if unknown:
            problems.add(unknown, (name, "objective", "name"))
            fields = {field: value for field, value in fields.items() if field != "objective"}
        section, errors = _build_section(kind, fields)
        for path, text in _descriptions(name, kind, fields, errors).items():
            problems.add(text, path)
        if section:
            invalid = {str(error["loc"][0]) for error in errors if error["loc"]}
            for concerned, text in section.problems():
                if not invalid.intersection(concerned):  # the section has the default there, not the user's value
                    problems.add_combination(name, concerned, text)
            sections[name] = section
    return sections


def _without_bad_sources(fields: dict[str, Any], problems: Problems, is_recorded: bool) -> dict[str, Any]:
    """The fields of a mixture; without `sources` and `stages` if a source has a problem, which is added to problems."""
    sources = fields.get("sources")
    if not isinstance(sources, list):
        return fields

    def check(kind: type[Section], values: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
        section, errors = _build_section(kind, values)
        yield from _descriptions("data", kind, values, errors).items()
        if section and not errors:
            for concerned, text in section.problems():
                yield ("data", concerned[0]), text

    def is_known(name: str) -> bool:
        return is_recorded or is_plugin(PLUGINS["data.name"], name)

    found = list(source_problems(sources, check, is_known))
    for path, text in found:
        problems.add(text, path)
    if not found:
        return fields
    return {name: value for name, value in fields.items() if name not in ("sources", "stages")} | {
        "sources": [{"name": "dummy_text", "weight": 1.0}]  # the others are checked without them
    }


def _descriptions(
    name: str, kind: type[Section], fields: dict[str, Any], errors: list[ErrorDetails]
) -> dict[KeyPath, str]:
    """Text by field; of several errors of a field (one per item, or per member of a union) the first."""
    found: dict[KeyPath, str] = {}
    for error in errors:
        path = (name, *map(str, error["loc"]))
        value = None
        if len(path) > 2 and len(subsections(kind, path[1])) > 1:
            path = (*path[:2], *path[3:])  # without pydantic's tag of the kind
        if len(path) > 1:
            value = fields.get(path[1])
        found.setdefault(path[:3], describe_error(path, error, kind, value))
    return found


def _build_section(kind: type[Section], fields: dict[str, Any]) -> tuple[Section | None, list[ErrorDetails]]:
    """The section without its invalid fields (so that the others can be checked too), and the errors."""
    try:
        return kind(**fields), []
    except ValidationError as error:
        errors = error.errors(include_url=False)
    except TypeError:  # a key that is not a string
        raise ConfigError(kind.__name__, ["field names must be text"]) from None
    invalid = {str(error["loc"][0]) for error in errors if error["loc"]}
    valid = {key: value for key, value in fields.items() if key not in invalid}
    try:
        return kind(**valid), errors
    except ValidationError:
        return None, errors
