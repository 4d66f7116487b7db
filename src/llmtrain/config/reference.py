"""The config reference as Markdown, made from the schema: docs/config.md, kept equal to it by a test."""

from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from llmtrain.config.schema import SECTIONS, Config, Section, subsection
from llmtrain.env import VARIABLES

HEADER = """# Config reference

Made from the schema by `llmtrain print-config --reference`; a test keeps it true.
Every field has a default, so a config names only what it changes. `--set section.field=value` overrides one;
`--set model.lora.rank=8` one of a section inside a section.
"""


def reference_markdown() -> str:
    parts = [HEADER]
    version = Config.model_fields["schema_version"]
    parts.append(f"`schema_version` (default `{version.default}`): {_one_line(version.description)}\n")
    for name, kind in SECTIONS.items():
        parts.append(
            f"## `{name}`\n\n{_one_line(kind.__doc__)}\n\n| field | type | default | meaning |\n|---|---|---|---|"
        )
        for field, info in kind.model_fields.items():
            parts.append(_row(field, info))
            inner = subsection(kind, field)
            parts += [_row(f"{field}.{name}", below) for name, below in inner.model_fields.items()] if inner else []
        parts.append("")
    return "\n".join([*parts, *_environment()])


def _environment() -> list[str]:
    lines = ["## Environment variables", ""]
    for who, variables in VARIABLES.items():
        lines += [f"{who}:", "", "| variable | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {meaning} |" for name, meaning in variables.items()]
        lines.append("")
    return lines


def _row(name: str, info: FieldInfo) -> str:
    return f"| `{name}` | {_type(info)} | {_default(info.default)} | {_one_line(info.description)} |"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _default(value: Any) -> str:
    if isinstance(value, Section):
        return "its own"
    return "empty" if value is None else f"`{list(value) if isinstance(value, tuple) else value}`"


def _type(info: FieldInfo) -> str:
    return _type_name(info.annotation)


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " / ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is list:
        return f"list of {_type_name(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "mapping"
    if get_origin(kind) is tuple:
        return "[" + ", ".join(_type_name(part) for part in get_args(kind)) + "]"
    if hasattr(kind, "__metadata__"):  # Annotated
        return _type_name(get_args(kind)[0])
    if get_args(kind):  # X | None, X | Y
        names = " or ".join(_type_name(part) for part in get_args(kind) if part is not type(None))
        return f"{names}, or empty" if type(None) in get_args(kind) else names
    if isinstance(kind, type) and issubclass(kind, Section):
        return "section"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true / false"}.get(kind.__name__, str(kind))
