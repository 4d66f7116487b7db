"""What is shown of a config: the fields that a user set to something else than their defaults."""

from typing import Any

import pytest

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config, changed_fields


def changed(*sets: str) -> dict[str, Any]:
    return changed_fields(load_config("gpt_stdlib", list(sets)).as_dict())


def test_defaults_are_left_out() -> None:
    found = changed_fields(Config().as_dict())
    assert set(found) == {"model", "data"}
    assert set(found["model"]) <= {"name", "architecture"}  # which decide which fields there are
    assert set(found["data"]) == {"name"}


def test_changed_fields_are_found_by_section() -> None:
    found = changed("trainer.lr=0.003", "model.mlp=relu2")
    assert found["trainer"]["lr"] == 0.003
    assert found["model"]["architecture"] == "modern"
    assert "mlp" not in found["model"]  # relu2 is the default of this architecture
    assert changed("model.mlp=swiglu")["model"]["mlp"] == "swiglu"


def test_fields_of_another_kind_have_their_own_defaults() -> None:
    values = {"model": {"name": "hf_causal_lm", "path": "m", "dtype": "float32", "attention": "sdpa"}}
    assert changed_fields(values)["model"] == {"name": "hf_causal_lm", "path": "m", "attention": "sdpa"}


def test_of_sections_inside_sections_only_what_differs() -> None:
    assert changed("tracking.mlflow.enabled=true")["tracking"] == {"mlflow": {"enabled": True}}


@pytest.mark.parametrize("damaged", [{"model": 3}, {"model": {"name": ["x"]}}, {"trainer": "text"}])
def test_damaged_sections_are_shown_as_they_are(damaged: dict[str, Any]) -> None:
    assert changed_fields(damaged) == damaged


def test_unknown_fields_are_shown() -> None:
    assert changed_fields({"run": {"unknown": 1}}) == {"run": {"unknown": 1}}
