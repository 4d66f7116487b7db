"""YAML text as values: any text is a value, or an error with a line; what we wrote ourselves is read faster."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.config.document import dump_document, parse_document, read_dumped
from llmtrain.config.load import build_config, list_presets, load_config
from llmtrain.config.yaml_values import load_dumped, load_yaml
from llmtrain.errors import ConfigError

TAGS = ("bool", "int", "float", "null", "str", "binary", "timestamp", "seq", "map", "set", "omap", "pairs")
CONTENTS = (
    "x",
    "''",
    "-",
    "0x",
    "0b",
    "é",
    "2001-99-99",
    "9" * 5000,
    "[a]",
    "[[]]",
    "{a: b}",
    "{=: x}",
    "[{a: b, c: d}]",
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def error_of(text: str) -> str | None:
    try:
        parse_document(text, "test.yaml")
    except ConfigError as problem:
        return str(problem)
    return None


@pytest.mark.parametrize("tag", TAGS)
def test_explicit_tag_fits_or_is_an_error_with_its_line(tag: str) -> None:
    errors = [error_of(f"run:\n  name: !!{tag} {content}\n") for content in CONTENTS]
    assert any(errors)
    assert all(error.startswith("test.yaml:2: not valid YAML") for error in errors if error)


@pytest.mark.parametrize(
    "value", ["!!bool x", "!!int ''", "!!float ''", "!!timestamp x", "!!map x", "!!map [a]", "9" * 5000]
)
def test_value_that_cannot_be_read_is_refused_in_a_file_and_in_an_override(value: str) -> None:
    with pytest.raises(ConfigError, match=r"^test.yaml:2: not valid YAML"):
        parse_document(f"trainer:\n  lr: {value}\n", "test.yaml")
    with pytest.raises(ConfigError, match=r"--set trainer.lr: not valid YAML"):
        build_config(parse_document("", "test.yaml"), [f"trainer.lr={value}"])


@pytest.mark.parametrize(
    "name", ["extends", "schema_version", "run", "run.seed", "run.name", "launch.env.A", "model.x"]
)
def test_integer_too_long_to_print_is_refused(name: str, tmp_path: Path) -> None:
    document: Any = "0x" + "f" * 10_000
    for part in reversed(name.split(".")):
        document = f"{{{part}: {document}}}"
    path = tmp_path / "long.yaml"
    path.write_text(document)
    with pytest.raises(ConfigError):
        load_config(path)


@pytest.mark.parametrize("preset", sorted(list_presets()))
def test_dumped_config_is_read_as_the_same_values(preset: str) -> None:
    text = dump_document(load_config(preset).as_dict())
    assert load_dumped(text) == load_yaml(text)[1]


@settings(max_examples=30)
@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_dumped_values_are_read_as_the_same_values(values: dict[str, Any]) -> None:
    text = dump_document(values)
    assert load_dumped(text) == values
    kept = dict(itertools.islice(values.items(), 2))
    assert load_dumped(text, skipped=values.keys() - kept.keys()) == {**dict.fromkeys(values), **kept}


@pytest.mark.parametrize("text", ["[" * 100_000, "a: " + "{a: " * 100_000, "- " * 100_000])
def test_deep_text_is_refused(text: str) -> None:
    """Without recursion in C, which would end the process."""
    with pytest.raises((ValueError, yaml.YAMLError)):
        load_dumped(text)
    with pytest.raises((ValueError, yaml.YAMLError)):
        load_dumped(f"skipped: {text}", skipped=("skipped",))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("launch: {nodes: 2}\ntrainer: {lr: 1}\n", {"launch": None, "trainer": {"lr": 1}}),
        ("trainer: {launch: 3}\n", {"trainer": {"launch": 3}}),
        ("launch: &a {lr: 1}\ntrainer: *a\n", {"launch": {"lr": 1}, "trainer": {"lr": 1}}),
    ],
)
def test_skipped_section_is_none_unless_another_refers_to_it(text: str, value: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert read_dumped(path, skipped=("launch",)) == value


def test_syntax_error_in_a_skipped_section_is_found(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("trainer: {lr: 1}\nlaunch: {nodes: [\n")
    with pytest.raises(ConfigError, match=r"config.yaml:2: not valid YAML"):
        read_dumped(path, skipped=("launch",))
