"""What is wrong with a config document: collected with its place, then listed in the order of the lines."""

import re
from collections.abc import Iterable
from typing import Any, get_args, get_origin

from pydantic_core import ErrorDetails

from llmtrain.config.aliases import alias_of
from llmtrain.config.document import Document, KeyPath
from llmtrain.config.schema import ARCHITECTURES, CUSTOM, KINDS, SECTIONS, Config, classes_of, subsection
from llmtrain.config.section import RUN_ID_PATTERN, Section
from llmtrain.config.tracking import TrackingSection
from llmtrain.config.upgrade import current_name
from llmtrain.errors import nearest
from llmtrain.plugins import installed_names
from llmtrain.registry import PLUGINS

SHOWN_LENGTH = 200
RUN_ID_RULE = "must be 2 to 40 lowercase letters, digits and hyphens, starting with a letter"
# Patterns of fields in words.
_PATTERNS = {
    RUN_ID_PATTERN: RUN_ID_RULE,
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
    "greater_than": "must be above {gt}",
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


class Problems:
    """The problems of a document so far."""

    def __init__(self, document: Document, overridden: Iterable[str] = (), overridden_by: str = "--set") -> None:
        self._document = document
        self.overridden_by = overridden_by
        """What messages call an override."""
        self._overridden = set(overridden)
        self._found: list[tuple[tuple[int, int], str]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, text: str, path: KeyPath = ()) -> None:
        """`path`: the field concerned; its place is put in front of the text."""
        parts = [path[:length] for length in range(len(path), 0, -1)]
        place = next((place for part in parts if (place := self._document.place(part))), None)
        is_set = any(".".join(part) in self._overridden for part in parts) or self._is_set(".".join(path))
        if is_set or (path and not place and self._is_set(path[0])):
            self._found.append(((3, 0), f"{self.overridden_by} {text}"))
        elif place:
            self._found.append(((int(place.is_inherited), place.line), f"{place} {text}"))
        else:
            self._found.append(((2, 0), text))

    def _is_set(self, section: str) -> bool:
        """Whether a field inside is overridden."""
        return any(key.startswith(f"{section}.") for key in self._overridden)

    def add_combination(self, section: str, fields: Iterable[str], text: str) -> None:
        """A problem between several fields: at the last line that sets one of them."""
        paths = [(section, field) for field in fields]
        lines = [place.line for path in paths if (place := self._document.place(path)) and not place.is_inherited]
        is_set = any(f"{key}.".startswith(f"{'.'.join(path)}.") for key in self._overridden for path in paths)
        if lines and not is_set:
            self._found.append(((0, max(lines)), f"line {max(lines)}: {text}"))
        else:
            self._found.append(((2, 0), text))

    def sorted(self) -> list[str]:
        """In the order of the lines, then those of the base of `extends`, then those without a line."""
        return [text for _, text in sorted(self._found, key=lambda row: row[0])]


def shown(value: object) -> str:
    """An invalid value, shortened."""
    try:
        text = repr(value)
    except ValueError:  # 0xfff...: Python does not print integers of thousands of digits
        text = "an integer with thousands of digits"
    return text if len(text) <= SHOWN_LENGTH else f"{text[:SHOWN_LENGTH]}..."


def describe_error(path: KeyPath, error: ErrorDetails, kind: type[Section], value: Any) -> str:
    """One of pydantic's errors in the words of a config. `value`: of the whole field."""
    dotted = ".".join(path)
    inner = subsection(kind, path[1]) if len(path) > 2 else None
    if error["type"] == "extra_forbidden":
        return describe_unknown(path, (inner or kind).model_fields, None if inner else kind)
    is_of_field = len(path) == (3 if inner else 2)
    if error["type"] == "missing" and is_of_field:
        from llmtrain.config.reference import field_descriptions

        return f"{dotted} is required. {field_descriptions(inner or kind).get(path[-1], '')}"
    example = None if inner else _tuple_example(kind, path[1])
    if example and error["type"] not in _RULES:
        return f"{'.'.join(path[:2])} must be {example}, got {shown(value)}."
    if not is_of_field and path[-1].isdecimal():
        dotted = f"{'.'.join(path[:-1])}: item {int(path[-1]) + 1}"
    rule = _rule(error)
    separator = " " if rule.startswith(("must", "may")) else ": "  # `launch.labels: keys must be ...`
    return f"{dotted}{separator}{rule}, got {shown(error['input'])}.{_suggestion(error)}"


def _tuple_example(kind: type[Section], field: str) -> str | None:
    """`two numbers such as [0.9, 0.95]` for a field with a fixed number of values; None for other fields."""
    info = kind.model_fields[field]
    if get_origin(info.annotation) is not tuple:
        return None
    count = len(get_args(info.annotation))
    return f"{'two' if count == 2 else count} numbers such as {list(info.default)}"


def _rule(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    if error["type"] == "string_pattern_mismatch" and context["pattern"] in _PATTERNS:
        return _PATTERNS[context["pattern"]]
    if error["type"] in _RULES:
        return _RULES[error["type"]].format(**context)
    message = error["msg"]
    message = f"{message[0].lower()}{message[1:]}".removeprefix("input should ").removeprefix("string should ")
    return message if message.startswith(("must", "may")) or " must " in message else f"must {message}"


def _suggestion(error: ErrorDetails) -> str:
    """A value that is near the invalid one and valid."""
    value, context = error["input"], error.get("ctx", {})
    if error["type"] == "literal_error" and isinstance(value, str):
        return nearest(value, re.findall(r"'([^']*)'", context["expected"]))
    if context.get("pattern") == RUN_ID_PATTERN and isinstance(value, str):
        slug = re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-0123456789")[:40].rstrip("-")
        return f" Try '{slug}'." if re.fullmatch(RUN_ID_PATTERN, slug) else ""
    return ""


def describe_unknown_kind(section: str, values: dict[str, Any]) -> tuple[str, str]:
    """The field that names an unknown kind, and what is wrong with it."""
    name = values.get("name", Config.model_fields[section].default.name)
    if section == "model" and name == "gpt":
        architecture = values.get("architecture")
        hint = nearest(architecture, ARCHITECTURES) if isinstance(architecture, str) else ""
        known = ", ".join(ARCHITECTURES)
        return "architecture", f"model.architecture {shown(architecture)} is unknown.{hint} Known: {known}."
    if not isinstance(name, str):
        return "name", f"{section}.name must be text, got {shown(name)}."
    names = [*KINDS[section], *installed_names(PLUGINS[f"{section}.name"])]
    return "name", (
        f"{section}.name {shown(name)} is unknown.{nearest(name, names)} Known: {', '.join(sorted(names))}, and "
        "package.module:Class for a class of your own."
    )


def describe_unknown_section(name: str) -> str:
    return describe_unknown((name,), SECTIONS, None)


def describe_unknown(path: KeyPath, known: Iterable[str], kind: type[Section] | None) -> str:
    """A section or field that does not exist: the name to write instead, else the names that exist."""
    is_section = len(path) == 1
    dotted = f"section '{path[0]}'" if is_section else ".".join(path)
    current = current_name(path)
    if current:
        return f"{dotted} is now {current}. Rename it, or write `schema_version: 2` to keep the old names."
    if kind is not None and kind is CUSTOM.get(path[0]):
        names = ", ".join(sorted(known))
        return f"{dotted} is unknown. Known: {names}. Options of the class go into {path[0]}.options."
    if kind and path[0] in CUSTOM and path[1:] == ("options",):
        return (
            f"{dotted} is unknown: {path[0]}.name {kind.model_fields['name'].default} takes no options. They belong to "
            f"classes of your own ({path[0]}.name: package.module:Class)."
        )
    own_architecture = kind.model_fields["architecture"].default if kind and kind in ARCHITECTURES.values() else None
    wanted = [name for name, each in ARCHITECTURES.items() if path[-1] in each.model_fields]
    if own_architecture and wanted:
        return (
            f"{dotted} only applies to model.architecture {wanted[0]}; here it is {own_architecture}. Remove it, or "
            f"set model.architecture to {wanted[0]}."
        )
    others = [name for name, each in KINDS.get(path[0], {}).items() if kind and path[-1] in each.model_fields]
    if others and kind:
        own = kind.model_fields["name"].default
        return (
            f"{dotted} only applies to {path[0]}.name {' and '.join(others)}; here it is {own}. Remove it, or change "
            f"{path[0]}.name."
        )
    alias = alias_of(path[-1], is_section) or _in_another_section(path)
    if alias and alias[0] != dotted:
        return f"{dotted} is unknown; here it is {alias[0]}.{f' {alias[1]}.' if alias[1] else ''}"
    own = " Trackers of your own go into tracking.custom (docs/extending.md)." if kind is TrackingSection else ""
    return f"{dotted} is unknown." + (nearest(path[-1], known) or f" Known: {', '.join(sorted(known))}.{own}")


def setting_of_option(name: str, value: str) -> str | None:
    """What to pass instead of an option `--name value` that does not exist; None if no field has this name."""
    field = name.lstrip("-").replace("-", "_")
    alias = alias_of(field, is_section=False)
    names = {f"{section}.{each}" for section in SECTIONS for kind in classes_of(section) for each in kind.model_fields}
    homes = sorted(each for each in names if field in (each, each.partition(".")[2]))
    fields = homes or [alias[0] if alias else ""]
    note = f" {alias[1]}." if alias and alias[1] and not homes else ""
    settings = " or ".join(f"--set {each}={value}" for each in fields if "." in each)
    return f"Use {settings}.{note}" if settings else None


def _in_another_section(path: KeyPath) -> tuple[str, str] | None:
    """Where a field with exactly this name is, if one section has it."""
    homes = [
        section
        for section in SECTIONS
        if section != path[0] and any(path[-1] in kind.model_fields for kind in classes_of(section))
    ]
    return (f"{homes[0]}.{path[-1]}", "") if len(homes) == 1 else None
