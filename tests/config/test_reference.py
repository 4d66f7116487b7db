import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtrain import registry
from llmtrain.config.load import list_presets
from llmtrain.config.reference import json_schema, reference_markdown
from llmtrain.config.schema import SECTIONS, SECTIONS_BY_NAME, Config, classes_of, may_change, subsections
from llmtrain.core.env import VARIABLES


def test_config_md_is_up_to_date(repo: Path) -> None:
    written = (repo / "docs" / "config.md").read_text()
    assert written == reference_markdown(), "regenerate it: llmtrain print-config --reference > docs/config.md"


def test_every_field_has_a_row_with_a_description() -> None:
    config_part = reference_markdown().partition("## Environment variables")[0]
    rows = [line.split(" | ") for line in config_part.splitlines() if line.startswith("| `")]
    fields = []
    of_kinds: list[str] = []
    """Of a field with several kinds, which have tables of their own below."""
    for section in SECTIONS:
        for kind in classes_of(section):
            for field in kind.model_fields:
                inner = list(subsections(kind, field).values())
                fields.append(field)
                if len(inner) == 1:
                    fields += [f"{field}.{name}" for name in inner[0].model_fields]
                elif inner:
                    of_kinds += [name for each in inner for name in each.model_fields]
            fields += of_kinds
            of_kinds = []
    assert "lora.rank" in fields
    assert "gamma" in fields
    assert [row[0].strip("| `") for row in rows] == fields
    assert all(row[-1].strip(" |") for row in rows)


def test_every_kind_is_registered() -> None:
    assert set(SECTIONS_BY_NAME["model"]) == set(registry.MODELS)
    assert set(SECTIONS_BY_NAME["data"]) == set(registry.DATA)


def test_every_section_of_the_config_is_listed() -> None:
    assert ["schema_version", *SECTIONS] == list(Config.model_fields)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("run.name", True),
        ("run.seed", False),
        ("run.threads", True),
        ("model.d_model", False),
        ("model.path", True),
        ("model.lora", False),
        ("data.files", True),
        ("data.val_fraction", False),
        ("data.tokenizer", True),
        ("trainer.max_steps", True),
        ("trainer.lr", False),
        ("trainer.early_stopping_patience", True),
        ("distributed.strategy", True),
        ("tracking.mlflow", True),
        ("output.root_dir", True),
        ("launch", True),
        ("nothing", False),
    ],
)
def test_fields_that_may_change_on_resume(path: str, expected: bool) -> None:
    assert may_change(path) is expected


def test_every_environment_variable_is_listed(repo: Path) -> None:
    """env.py declares all of them; programs that run in pods cannot import it, so their names are compared here."""
    listed = {name for variables in VARIABLES.values() for name in variables}
    used = {
        name
        for path in (repo / "src").rglob("*.py")
        for name in re.findall(r"\bLLMTRAIN_[A-Z_]+[A-Z]\b", path.read_text())
    }
    assert used == listed


TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def accepts(schema: Any, value: Any, root: dict[str, Any]) -> bool:
    """Whether a value fits a JSON Schema, for the keywords that ours uses."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        target: Any = root
        for name in schema["$ref"].removeprefix("#/").split("/"):
            target = target[name]
        return accepts(target, value, root)
    if "oneOf" in schema:
        return sum(accepts(each, value, root) for each in schema["oneOf"]) == 1
    if "anyOf" in schema:
        return any(accepts(each, value, root) for each in schema["anyOf"])
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return False
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    if isinstance(value, dict):
        fields, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        has_required = all(name in value for name in schema.get("required", []))
        return has_required and all(accepts(fields.get(name, rest), item, root) for name, item in value.items())
    return not isinstance(value, list) or all(accepts(schema.get("items", {}), item, root) for item in value)


def is_valid(document: dict[str, Any]) -> bool:
    schema = json_schema()
    return accepts(schema, document, schema)


def test_json_schema_file_is_up_to_date(repo: Path) -> None:
    written = json.loads((repo / "configs/presets/config.schema.json").read_text())
    assert written == json_schema(), "regenerate it: llmtrain config-schema > configs/presets/config.schema.json"


@pytest.mark.parametrize("preset", sorted(list_presets()))
def test_json_schema_accepts_presets_and_each_names_it(preset: str) -> None:
    path = list_presets()[preset]
    text = path.read_text()
    (modeline,) = re.findall(r"^# yaml-language-server: \$schema=(.+)$", text, re.M)
    assert (path.parent / modeline).is_file()
    assert is_valid(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, True),
        ({"model": {"d_model": 64}, "data": {"val_fraction": 0.1}}, True),
        ({"data": {"name": "text_files", "files": "a.txt"}}, True),
        ({"launch": {"nodes": "2:4", "env": {"N": 3}, "resources": {"cpu": 8}}}, True),
        ({"model": {"name": "mine:Bag", "options": {"width": 3}}, "data": {"name": "a.b:C"}}, True),
        ({"tracking": {"custom": [{"name": "mine:Csv"}]}}, True),
        ({"data": {"name": "mixture", "sources": [{"name": "text_files", "files": "a", "weight": 1}]}}, True),
        ({"data": {"name": "mixture", "sources": [{"name": "text_files", "files": "a"}]}}, False),
        ({"data": {"name": "mixture", "sources": [{"name": "dummy_text", "files": "a", "weight": 1}]}}, False),
        ({"data": {"name": "mixture", "sources": [{"name": "dummy_text", "tokenizer": "a", "weight": 1}]}}, False),
        ({"model": {"name": "mine:Bag", "d_model": 64}}, False),
        ({"model": {"name": "gpt", "options": {}}}, False),
        ({"schema_version": 2}, False),
        ({"model": {"name": "hf_causal_lm"}}, False),
        ({"model": {"name": "hf_causal_lm", "path": "x", "d_model": 64}}, False),
        ({"model": {"name": "nothing"}}, False),
        ({"trainer": {"max_step": 5}}, False),
        ({"trainer": {"max_steps": "5"}}, False),
        ({"launch": {"kind": "cron_job"}}, False),
        ({"mlflow": {"enabled": True}}, False),
    ],
)
def test_json_schema_checks_documents(document: dict[str, Any], expected: bool) -> None:
    assert is_valid(document) is expected


def test_json_schema_accepts_every_resolved_config() -> None:
    assert is_valid(Config().as_dict())
