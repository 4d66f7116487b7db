"""docs/config.md and the JSON Schema, generated from the config schema. Tests keep both up to date."""

import ast
import inspect
import json
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from llmtrain.config.mixture import SHARED_FIELDS, MixtureSection
from llmtrain.config.schema import (
    ARCHITECTURES,
    PLUGIN_SECTIONS,
    SECTIONS,
    SECTIONS_BY_NAME,
    Config,
    classes_of,
    subsections,
)
from llmtrain.config.section import PLUGIN_TAG, DefaultMarker, ResumeMarker, Section
from llmtrain.core.env import VARIABLES
from llmtrain.plugins import installed_names
from llmtrain.registry import PLUGINS

HEADER = """# Config reference

Generated from the schema by `llmtrain print-config --reference`; a test keeps it up to date.
A config sets only what differs from the defaults. `--set section.field=value` overrides one field;
`--set model.lora.rank=8` overrides a field of a section inside a section.
`extends: BASE` at the top of a file starts from a preset or another file, relative to it: sections are merged field by
field, lists are replaced.
`llmtrain config-schema` prints the same as a JSON Schema for editors. Fields marked `yes` under *resume* may differ
when a run is resumed; any other change requires `--allow-config-change`.
"""
PLUGIN_NAME = "package.module:Class"
_PLUGIN_FIELDS = {
    "PluginModelSection": "model.name",
    "PluginDataSection": "data.name",
    "PluginObjectiveSection": "trainer.objective",
    "PluginTrackerSection": "tracking.custom",
}
EXTENDS = "Config that this one is merged over: a preset, or a file relative to this one."
TABLE_HEAD = "| field | type | default | resume | description |\n|---|---|---|---|---|"


def reference_markdown() -> str:
    version = Config.model_fields["schema_version"]
    parts = [
        HEADER,
        f"`schema_version` (default `{version.default}`): {field_descriptions(Config)['schema_version']}\n",
    ]
    for name, section in SECTIONS.items():
        if name in SECTIONS_BY_NAME:
            kinds = ", ".join(f"`{kind}`" for kind in SECTIONS_BY_NAME[name])
            default = Config.model_fields[name].default.name
            parts.append(
                f"## `{name}`\n\n`{name}.name` selects the kind: {kinds}, or a class of your own, "
                f"`{PLUGIN_NAME}`. Default: `{default}`.\n"
            )
            for kind, each in (*SECTIONS_BY_NAME[name].items(), (PLUGIN_NAME, PLUGIN_SECTIONS[name])):
                if each is not ARCHITECTURES["gpt2"]:
                    parts += [f"### `{name}.name: {kind}`\n", *_table(each, False)]
                    continue
                for architecture, variant in ARCHITECTURES.items():
                    parts += [f"### `{name}.name: {kind}`, `architecture: {architecture}`\n", *_table(variant, False)]
        else:
            parts += [f"## `{name}`\n", *_table(section, _is_marked(Config.model_fields[name]))]
        for each in classes_of(name):
            parts += _tables_of_kinds(name, each)
    return "\n".join([*parts, *_environment()])


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a config document, for editors."""
    schema = Config.model_json_schema()
    for name, kind in _all_sections().items():
        fields = schema["properties"]
        if kind is not Config:
            fields = schema["$defs"][name]["properties"]
        for field, text in field_descriptions(kind).items():
            fields[field]["description"] = text
    for section, kinds in SECTIONS_BY_NAME.items():
        for name, each in kinds.items():
            if name != Config.model_fields[section].default.name:  # else a document without `name` matches several
                schema["$defs"][each.__name__].setdefault("required", []).append("name")
    schema["$defs"][ARCHITECTURES["modern"].__name__]["required"] = ["architecture"]
    for name, field in _PLUGIN_FIELDS.items():
        _accept_installed(schema["$defs"][name]["properties"]["name"], field)
    schema["$defs"]["SourceSection"] = _source_schema(schema["$defs"])
    for section in SECTIONS:
        del schema["properties"][section]["default"]  # long, and repeated in the section
    schema["properties"] = {"extends": {"type": "string", "description": EXTENDS}, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_without_titles(schema)}


def _source_schema(definitions: dict[str, Any]) -> dict[str, Any]:
    """A source of a mixture: its own fields, and those of any kind of data but the shared ones."""
    source = definitions["SourceSection"]
    variants = []
    for kind in (*SECTIONS_BY_NAME["data"].values(), PLUGIN_SECTIONS["data"]):
        if kind is MixtureSection:
            continue
        fields = dict(source["properties"])
        for name in definitions[kind.__name__]["properties"]:
            if name not in SHARED_FIELDS:
                fields[name] = {"$ref": f"#/$defs/{kind.__name__}/properties/{name}"}
        variants.append({"properties": fields, "required": ["name", "weight"], "additionalProperties": False})
    return {"type": "object", "anyOf": variants, "description": source["description"]}


def _accept_installed(schema: dict[str, Any], field: str) -> None:
    """Also accept the entry points that are installed here."""
    if names := installed_names(PLUGINS[field]):
        schema["anyOf"] = [{"pattern": schema.pop("pattern")}, {"enum": names}]


def _without_titles(value: Any) -> Any:
    """Pydantic's titles are the field names again."""
    if isinstance(value, dict):
        return {name: _without_titles(item) for name, item in value.items() if name != "title"}
    if isinstance(value, list):
        return [_without_titles(item) for item in value]
    return value


@cache
def field_descriptions(kind: type[Section]) -> dict[str, str]:
    """The docstrings under the fields of a section and of its base classes, by field."""
    found = {}
    for each in reversed(kind.__mro__[: kind.__mro__.index(Section)]):
        (definition,) = ast.parse(inspect.getsource(each)).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = _one_line(str(text.value.value))
    return found


def _all_sections() -> dict[str, type[Section]]:
    """Every class of a document, by the name that it has in the JSON Schema."""
    kinds: list[type[Section]] = [Config, *(kind for section in SECTIONS for kind in classes_of(section))]
    inner = [each for kind in kinds[1:] for field in kind.model_fields for each in subsections(kind, field).values()]
    return {kind.__name__: kind for kind in (*kinds, *inner)}


def _table(section: type[Section], may_change: bool) -> list[str]:
    lines = [f"{_one_line(section.__doc__)}\n", TABLE_HEAD]
    for name, info in section.model_fields.items():
        marked = may_change or _is_marked(info)
        lines.append(_row(name, info, marked, field_descriptions(section)[name]))
        kinds = list(subsections(section, name).values())
        if len(kinds) != 1:
            continue
        (inner,) = kinds
        for each, below in inner.model_fields.items():
            lines.append(_row(f"{name}.{each}", below, marked, field_descriptions(inner)[each]))
    return [*lines, ""]


def _tables_of_kinds(section: str, kind: type[Section]) -> list[str]:
    """A table per kind of those fields that hold one of several sections: trainer.objective."""
    lines = []
    for field, info in kind.model_fields.items():
        inner = subsections(kind, field)
        if len(inner) < 2:
            continue
        for tag, each in inner.items():
            name = PLUGIN_NAME if tag == PLUGIN_TAG else tag
            lines += [f"### `{section}.{field}.name: {name}`\n", *_table(each, _is_marked(info))]
    return lines


def _is_marked(info: FieldInfo) -> bool:
    return any(isinstance(each, ResumeMarker) for each in info.metadata)


def _environment() -> list[str]:
    lines = ["## Environment variables", ""]
    for who, variables in VARIABLES.items():
        lines += [f"{who}:", "", "| variable | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {meaning} |" for name, meaning in variables.items()]
        lines.append("")
    return lines


def _row(name: str, info: FieldInfo, may_change: bool, description: str) -> str:
    type_name = _type_name(info.annotation)
    is_defaulted = any(isinstance(each, DefaultMarker) for each in info.metadata)
    if is_defaulted and type(None) not in get_args(info.annotation):
        type_name += " | null"
    resume = ""
    if may_change:
        resume = "yes"
    cells = (
        f"`{name}`",
        f"`{type_name}`".replace("|", "\\|"),
        _default(info),
        resume,
        description.replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.default
    if isinstance(value, Section):
        return "`{...}`"
    if isinstance(value, str):
        return f"`{value}`"
    return f"`{json.dumps(value)}`"


def _type_name(kind: Any) -> str:
    """A type in the terms of YAML, such as `str | null` or `list[str]`."""
    if kind is type(None):
        return "null"
    if hasattr(kind, "__metadata__"):  # Annotated
        return _type_name(get_args(kind)[0])
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Literal:
        return " | ".join(str(value) for value in arguments)
    if origin is tuple:
        return f"[{', '.join(_type_name(part) for part in arguments)}]"
    if origin in (list, dict):
        return f"{origin.__name__}[{', '.join(_type_name(part) for part in arguments)}]"
    if arguments:  # a union
        return " | ".join(_type_name(part) for part in arguments)
    if isinstance(kind, type) and issubclass(kind, Section):
        return "section"
    if kind is Any:
        return "any"
    return str(kind.__name__)
