"""What is wrong with a config document: collected with its place, then listed in the order of the lines."""

import re
from collections.abc import Iterable
from typing import Any, get_args, get_origin

from pydantic_core import ErrorDetails

from llmtrain.compat.upgrade import current_name
from llmtrain.config.aliases import alias_of
from llmtrain.config.document import Document, KeyPath
from llmtrain.config.objective import DEFAULT_OBJECTIVE, OBJECTIVES, ObjectiveSection, PluginObjectiveSection
from llmtrain.config.schema import (
    ARCHITECTURES,
    PLUGIN_SECTIONS,
    SECTIONS,
    SECTIONS_BY_NAME,
    Config,
    classes_of,
    subsection,
)
from llmtrain.config.section import PATH_PATTERN, RUN_ID_PATTERN, Section
from llmtrain.config.tracking import TrackingSection
from llmtrain.errors import listed, nearest
from llmtrain.plugins import installed_names, is_plugin
from llmtrain.registry import PLUGINS

SHOWN_LENGTH = 200
RUN_ID_RULE = "must be 2 to 40 lowercase letters, digits and hyphens, starting with a letter"
# Patterns of fields in words.
_PATTERNS = {
    RUN_ID_PATTERN: RUN_ID_RULE,
    PATH_PATTERN: "must be a path without NUL characters",
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "must be a file name of letters, digits, dots, hyphens and underscores",
    r"^[A-Za-z0-9._-]+$": "must be letters, digits, dots, hyphens and underscores",
    r"^(env://|tcp://[^/:]+:[0-9]+)$": "must be env:// or tcp://host:port",
    r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$": "must be lowercase letters, digits and hyphens",
    r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$": "must be lowercase letters, digits, dots and hyphens",
}
# Types of pydantic's errors in words; {} is a limit from the error.
_RULES = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be an integer",
    "int_type": "must be an integer",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "model_attributes_type": "must be a section with fields",
    "model_type": "must be a section with fields",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "string_type": "must be text",
}


_OTHER_VALUES = {"gpu": "cuda", "bfloat16": "bf16", "float32": "fp32", "float16": "bf16"}
"""What other tools call a value -> that value."""
_WITHOUT_LINE = (2, 0)
_FROM_OVERRIDES = (3, 0)


class Problems:
    """The problems of a document so far."""

    def __init__(self, document: Document, overridden: Iterable[str] = (), overridden_by: str = "--set") -> None:
        self._document = document
        self.overridden_by = overridden_by
        """What messages call an override."""
        self._overridden = set(overridden)
        self._found: list[tuple[tuple[int, int], str]] = []
        """(group, line): 0 the document, 1 the base of `extends`, then _WITHOUT_LINE and _FROM_OVERRIDES."""

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, text: str, path: KeyPath = ()) -> None:
        """`path`: the field concerned; its place is put in front of the text."""
        place = None
        is_set = self._is_set(".".join(path))
        for length in range(len(path), 0, -1):  # the innermost key that has a line
            place = place or self._document.place(path[:length])
            is_set = is_set or ".".join(path[:length]) in self._overridden
        if path and not place and self._is_set(path[0]):
            is_set = True
        if is_set:
            self._found.append((_FROM_OVERRIDES, f"{self.overridden_by} {text}"))
        elif place and place.is_inherited:
            self._found.append(((1, place.line), f"{place} {text}"))
        elif place:
            self._found.append(((0, place.line), f"{place} {text}"))
        else:
            self._found.append((_WITHOUT_LINE, text))

    def _is_set(self, section: str) -> bool:
        """Whether a field inside is overridden."""
        return any(key.startswith(f"{section}.") for key in self._overridden)

    def add_combination(self, section: str, fields: Iterable[str], text: str) -> None:
        """A problem between several fields: at the last line that sets one of them."""
        last = 0
        is_set = False
        for field in fields:
            place = self._document.place((section, field))
            if place and not place.is_inherited:
                last = max(last, place.line)
            name = f"{section}.{field}"
            is_set = is_set or name in self._overridden or self._is_set(name)
        if last and not is_set:
            self._found.append(((0, last), f"line {last}: {text}"))
        else:
            self._found.append((_WITHOUT_LINE, text))

    def sorted(self) -> list[str]:
        """The problems by line, then those of the base of `extends`, those without a line, and those of overrides."""
        return [text for _, text in sorted(self._found, key=lambda row: row[0])]


def shown(value: object) -> str:
    """An invalid value, shortened."""
    try:
        text = repr(value)
    except ValueError:  # 0xfff...: Python does not print integers of thousands of digits
        text = "an integer with thousands of digits"
    if len(text) > SHOWN_LENGTH:
        text = f"{text[:SHOWN_LENGTH]}..."
    return text


def describe_error(path: KeyPath, error: ErrorDetails, kind: type[Section], value: Any) -> str:
    """One of pydantic's errors in the words of a config. `value`: of the whole field."""
    dotted = ".".join(path)
    inner = None
    depth = 2  # section.field
    if len(path) > 2:
        inner = subsection(kind, path[1], value)
        if inner:
            depth = 3
    if error["type"] == "extra_forbidden":
        if inner:
            text = _of_another_objective(path, inner) if issubclass(inner, ObjectiveSection) else None
            return text or describe_unknown(path, inner.model_fields, None)
        return describe_unknown(path, kind.model_fields, kind)
    is_of_field = len(path) == depth  # else of an item of its list
    if error["type"] == "missing" and is_of_field:
        from llmtrain.config.reference import field_descriptions

        return f"{dotted} is required. {field_descriptions(inner or kind).get(path[-1], '')}"
    if inner is None and error["type"] not in _RULES:
        example = _tuple_example(kind, path[1])
        if example:
            return f"{'.'.join(path[:2])} must be {example}, got {shown(value)}."
    if not is_of_field and path[-1].isdecimal():
        dotted = f"{'.'.join(path[:-1])}: item {int(path[-1]) + 1}"
    rule = _rule(error)
    if not rule.startswith(("must", "may")):  # `launch.labels: keys must be ...`
        dotted += ":"
    return f"{dotted} {rule}, got {shown(error['input'])}.{_suggestion(error)}"


def _tuple_example(kind: type[Section], field: str) -> str | None:
    """`two numbers such as [0.9, 0.95]` for a field with a fixed number of values; None for other fields."""
    info = kind.model_fields[field]
    if get_origin(info.annotation) is not tuple:
        return None
    count = str(len(get_args(info.annotation)))
    if count == "2":
        count = "two"
    return f"{count} numbers such as {list(info.default)}"


def _rule(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    if error["type"] == "string_pattern_mismatch" and context["pattern"] in _PATTERNS:
        return _PATTERNS[context["pattern"]]
    if error["type"] in _RULES:
        return _RULES[error["type"]].format(**context)
    message = error["msg"]
    message = f"{message[0].lower()}{message[1:]}".removeprefix("input should ").removeprefix("string should ")
    if message.startswith(("must", "may")) or " must " in message:
        return message
    return f"must {message}"


def _suggestion(error: ErrorDetails) -> str:
    """A value that is near the invalid one and valid."""
    value = error["input"]
    context = error.get("ctx", {})
    if error["type"] == "literal_error" and isinstance(value, str):
        accepted = re.findall(r"'([^']*)'", context["expected"])
        other_name = _OTHER_VALUES.get(value)
        if other_name in accepted:
            return f" Did you mean '{other_name}'?"
        return nearest(value, accepted)
    if context.get("pattern") == RUN_ID_PATTERN and isinstance(value, str):
        slug = re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-0123456789")[:40].rstrip("-")
        if re.fullmatch(RUN_ID_PATTERN, slug):
            return f" Try '{slug}'."
    return ""


def describe_unknown_kind(section: str, values: dict[str, Any]) -> tuple[str, str]:
    """The field that names an unknown kind, and what is wrong with it."""
    name = values.get("name", Config.model_fields[section].default.name)
    if section == "model" and name == "gpt":
        architecture = values.get("architecture")
        hint = ""
        if isinstance(architecture, str):
            hint = nearest(architecture, ARCHITECTURES)
        known = ", ".join(ARCHITECTURES)
        return "architecture", f"model.architecture {shown(architecture)} is unknown.{hint} Known: {known}."
    if not isinstance(name, str):
        return "name", f"{section}.name must be text, got {shown(name)}."
    names = [*SECTIONS_BY_NAME[section], *installed_names(PLUGINS[f"{section}.name"])]
    return "name", (
        f"{section}.name {shown(name)} is unknown.{nearest(name, names)} Known: {', '.join(sorted(names))}, and "
        "package.module:Class for a class of your own."
    )


def describe_unknown_objective(kind: type[Section], value: Any) -> str | None:
    """What is wrong with the name of an objective; None if nothing is, and for sections without one."""
    if "objective" not in kind.model_fields:
        return None
    if isinstance(value, str):
        return f"trainer.objective must be a section with fields, got {shown(value)}. Write trainer.objective.name."
    if not isinstance(value, dict):
        return None
    name = value.get("name", DEFAULT_OBJECTIVE)
    if not isinstance(name, str):
        return f"trainer.objective.name must be text, got {shown(name)}."
    plugins = PLUGINS["trainer.objective"]
    if name in OBJECTIVES or is_plugin(plugins, name):
        return None
    names = [*OBJECTIVES, *installed_names(plugins)]
    return (
        f"trainer.objective.name {shown(name)} is unknown.{nearest(name, names)} Known: {', '.join(sorted(names))}, "
        "and package.module:Class for a class of your own."
    )


def _of_another_objective(path: KeyPath, kind: type[ObjectiveSection]) -> str | None:
    """For a field that only other objectives have."""
    names = [name for name, each in OBJECTIVES.items() if path[-1] in each.model_fields]
    if not names or kind is PluginObjectiveSection:
        return None
    here = next(name for name, each in OBJECTIVES.items() if each is kind)
    return (
        f"{'.'.join(path)} only applies to trainer.objective.name {' and '.join(names)}; here it is {here}. Remove it, "
        "or change trainer.objective.name."
    )


def describe_unknown(path: KeyPath, known: Iterable[str], kind: type[Section] | None) -> str:
    """A section or field that does not exist: the name to write instead, else the names that exist."""
    is_section = len(path) == 1
    dotted = ".".join(path)
    if is_section:
        dotted = f"section '{path[0]}'"
    current = current_name(path)
    if current:
        return f"{dotted} is now {current}. Rename it, or write `schema_version: 2` to keep the old names."
    if kind is not None and kind is PLUGIN_SECTIONS.get(path[0]):
        names = ", ".join(sorted(known))
        return f"{dotted} is unknown. Known: {names}. Options of the class go into {path[0]}.options."
    if kind and path[0] in PLUGIN_SECTIONS and path[1:] == ("options",):
        return (
            f"{dotted} is unknown: {path[0]}.name {kind.model_fields['name'].default} takes no options. They belong to "
            f"classes of your own ({path[0]}.name: package.module:Class)."
        )
    if kind is not None and (text := _of_another_kind(path, kind)):
        return text
    alias = alias_of(path[-1], is_section) or _in_another_section(path)
    if alias and alias[0] != dotted:
        name, conversion = alias
        text = f"{dotted} is unknown; here it is {name}."
        if conversion:
            text += f" {conversion}."
        return text
    similar = nearest(path[-1], known)
    if similar:
        return f"{dotted} is unknown.{similar}"
    fields = sorted(known)
    shown_fields = listed(fields, path[-1])
    text = f"{dotted} is unknown. Known: {shown_fields}."
    if shown_fields != ", ".join(fields):
        text += " docs/config.md lists all."
    if kind is TrackingSection:
        text += " Trackers of your own go into tracking.custom (docs/extending.md)."
    return text


def _of_another_kind(path: KeyPath, kind: type[Section]) -> str | None:
    """For a field that only another architecture or kind of model or data has."""
    dotted = ".".join(path)
    section = path[0]
    architectures = [name for name, each in ARCHITECTURES.items() if path[-1] in each.model_fields]
    if architectures and kind in ARCHITECTURES.values():
        return (
            f"{dotted} only applies to model.architecture {architectures[0]}; here it is "
            f"{kind.model_fields['architecture'].default}. Remove it, or set model.architecture to {architectures[0]}."
        )
    kinds = [name for name, each in SECTIONS_BY_NAME.get(section, {}).items() if path[-1] in each.model_fields]
    if kinds:
        return (
            f"{dotted} only applies to {section}.name {' and '.join(kinds)}; here it is "
            f"{kind.model_fields['name'].default}. Remove it, or change {section}.name."
        )
    return None


def setting_of_option(name: str, value: str) -> str | None:
    """What to pass instead of an option `--name value` that does not exist; None if no field has this name."""
    field = name.lstrip("-").replace("-", "_")
    fields = []
    for section in sorted(SECTIONS):
        inner = field.removeprefix(f"{section}.")
        if any(inner in kind.model_fields for kind in classes_of(section)):
            fields.append(f"{section}.{inner}")
    note = ""
    alias = alias_of(field, is_section=False)
    if not fields and alias and "." in alias[0]:
        name, conversion = alias
        fields = [name]
        if conversion:
            note = f" {conversion}."
    if not fields:
        return None
    settings = " or ".join(f"--set {each}={value}" for each in fields)
    return f"Use {settings}.{note}"


def _in_another_section(path: KeyPath) -> tuple[str, str] | None:
    """Where a field with exactly this name is, if one section has it."""
    homes = []
    for section in SECTIONS:
        if section != path[0] and any(path[-1] in kind.model_fields for kind in classes_of(section)):
            homes.append(section)
    if len(homes) == 1:
        return f"{homes[0]}.{path[-1]}", ""
    return None
