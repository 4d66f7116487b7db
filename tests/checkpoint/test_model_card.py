"""The model card (README.md) of an adapter or a model."""

from typing import Any

import pytest
import yaml

from llmtrain.checkpoint.model_card import card_with_base_model, model_card
from llmtrain.checkpoint.state import TrainState
from llmtrain.config.document import Document
from llmtrain.config.load import build_config
from llmtrain.config.schema import Config
from llmtrain.hub.model_names import HubModel

BASE = HubModel("somebody/base-model", "0123abcd")
PROGRESS = TrainState(
    step=12,
    tokens=34567,
    first_train_loss=5.25,
    last_train_loss=1.5,
    last_val_loss=1.75,
    evaluated_step=12,
    best_val_loss=1.625,
    best_step=8,
    epoch=2,
).as_dict()


def config(**sections: dict[str, Any]) -> Config:
    document: dict[str, dict[str, Any]] = {
        "run": {"name": "my run"},
        "model": {"name": "hf_causal_lm", "path": "somebody/base-model", "lora": {"rank": 4}},
        "data": {"name": "instruct_jsonl", "train_file": "rows.jsonl"},
    }
    for name, values in sections.items():
        other_kind = name != "run" and "name" in values
        document[name] = values if other_kind else {**document.get(name, {}), **values}
    return build_config(Document("test", document))


def head(card: str) -> dict[str, Any]:
    begin, yaml_head, _ = card.split("---\n", 2)
    assert begin == "", "the head must be the very first thing"
    value = yaml.safe_load(yaml_head)
    assert isinstance(value, dict)
    return value


def table(card: str) -> dict[str, str]:
    rows = [line.strip("|").split("|") for line in card.splitlines() if line.startswith("| ")]
    return {name.strip(): value.strip() for name, value in rows if name.strip()}


def test_header_has_the_hub_metadata() -> None:
    card = model_card(config(), PROGRESS, BASE, "ab" * 32, is_adapter=True)
    assert head(card) == {
        "base_model": "somebody/base-model",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["llmtrain", "lora"],
    }
    merged = head(model_card(config(), PROGRESS, BASE, None, is_adapter=False))
    assert merged["library_name"] == "transformers"
    assert merged["base_model"] == "somebody/base-model"


def test_card_has_losses_steps_and_origin() -> None:
    card = model_card(config(), PROGRESS, BASE, "ab" * 32, is_adapter=True)
    assert table(card) == {
        "steps": "12",
        "epochs": "2",
        "target tokens seen": "34,567",
        "training loss, first logged": "5.2500",
        "training loss, last logged": "1.5000",
        "validation loss": "1.7500",
        "best validation loss (of step 8, not of these weights)": "1.6250",
    }
    assert "# my run\n" in card
    base = "`somebody/base-model` at revision `0123abcd`"
    assert f"Low-rank adapters (LoRA) of {base} (SHA-256 of its files `{'ab' * 32}`)" in card
    assert "trained on `rows.jsonl` (instruct_jsonl)" in card


def test_card_has_the_config_as_yaml() -> None:
    card = model_card(config(trainer={"lr": 0.25}, run={"seed": 7}), PROGRESS, BASE, None, is_adapter=True)
    kept = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert kept["model"]["lora"]["rank"] == 4
    assert kept["trainer"]["lr"] == 0.25
    assert kept["run"]["seed"] == 7


def test_unknown_values_are_omitted() -> None:
    """At a checkpoint before the first evaluation."""
    card = model_card(
        config(), TrainState(step=3, first_train_loss=2.0, last_train_loss=1.0).as_dict(), BASE, None, True
    )
    assert "validation loss" not in card
    assert "None" not in card
    assert "SHA-256" not in card
    assert table(model_card(config(), {}, BASE, None, is_adapter=True)) == {}


def test_card_of_full_fine_tuning_and_of_a_model_from_scratch() -> None:
    full = model_card(config(model={"lora": None}), PROGRESS, BASE, None, is_adapter=False)
    assert "All weights of `somebody/base-model`" in full
    assert head(full)["tags"] == ["llmtrain"]
    scratch = config(
        model={"name": "gpt"},
        data={"name": "text_files", "files": ["a.txt", "b.txt"]},
    )
    card = model_card(scratch, PROGRESS, None, None, is_adapter=False)
    assert "base_model" not in head(card)
    assert "trained from scratch on `a.txt, b.txt`" in card


@pytest.mark.parametrize("lora", [{"rank": 4}, None])
def test_base_model_without_a_name_is_left_out(lora: dict[str, Any] | None) -> None:
    """A path of this machine is of no use to others."""
    fine_tuned = config(model={"path": "/mnt/me/models/base", "lora": lora})
    card = model_card(fine_tuned, PROGRESS, None, "ab" * 32, is_adapter=lora is not None)
    assert "base_model" not in head(card)
    assert "/mnt/me" not in card
    assert "ab" * 32 in card
    assert "from scratch" not in card


def test_base_model_of_an_existing_card_is_replaced() -> None:
    card = model_card(config(), PROGRESS, HubModel("somebody/another"), None, is_adapter=True)
    changed = card_with_base_model(card, BASE)
    assert head(changed) == {**head(card), "base_model": "somebody/base-model"}
    assert table(changed) == table(card)
    assert card_with_base_model(changed, BASE) == changed
    assert card_with_base_model(changed, None) == changed


@pytest.mark.parametrize("base", [BASE, None])
def test_path_in_an_existing_card_is_removed(base: HubModel | None) -> None:
    """As earlier versions wrote it."""
    card = model_card(config(), PROGRESS, HubModel("/mnt/me/base"), None, is_adapter=True)
    changed = card_with_base_model(card, base)
    assert "/mnt/me" not in changed
    assert head(changed).get("base_model") == (base.name if base else None)


def test_card_has_the_notes() -> None:
    assert "a note of mine" in model_card(
        config(run={"notes": "a note of mine"}), PROGRESS, BASE, None, is_adapter=True
    )


def test_card_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """People upload model cards."""
    monkeypatch.setenv("HF_TOKEN", "hf_CanaryOnTheCard7")
    secret = config(run={"notes": "with hf_CanaryOnTheCard7", "name": "hf_CanaryOnTheCard7"})
    assert "CanaryOnTheCard7" not in model_card(secret, PROGRESS, BASE, None, is_adapter=True)


def test_loss_of_another_step_is_marked() -> None:
    saved_between = {**PROGRESS, "evaluated_step": 8, "best_step": 12}
    found = table(model_card(config(), saved_between, BASE, None, is_adapter=True))
    assert "validation loss" not in found
    assert found["validation loss (of step 8, not of these weights)"] == "1.7500"
    assert found["best validation loss"] == "1.6250"


def test_scores_on_tasks_are_listed_with_what_makes_them_comparable() -> None:
    score = {
        "version": "1.0",
        "few_shot": 5,
        "items": 200,
        "sha256": "ef" * 32,
        "metrics": {"acc": 0.5, "acc_norm": 0.625},
    }
    card = model_card(config(), {**PROGRESS, "tasks": {"arc_easy": score}}, BASE, None, is_adapter=True)
    assert f"| arc_easy | 1.0 | 5 | 200 | `{'ef' * 32}` | acc 0.5000, acc_norm 0.6250 |" in card
    assert "## Tasks" not in model_card(config(), PROGRESS, BASE, None, is_adapter=True)
