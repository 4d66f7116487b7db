"""Another optimizer for a recorded config, which has the defaults of the former one filled in."""

from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config


@pytest.mark.parametrize("architecture", ["gpt2", "modern"])
@pytest.mark.parametrize(("before", "after"), [("muon", "adamw"), ("adamw", "muon")])
def test_defaults_of_the_former_optimizer_are_replaced(architecture: str, before: str, after: str) -> None:
    document = {"model": {"name": "gpt", "architecture": architecture}, "trainer": {"micro_batch_size": 4}}
    recorded = load_config(document, [("trainer.optimizer", before)]).as_dict()
    changed = load_config(recorded, [("trainer.optimizer", after)]).trainer
    expected = load_config(document, [("trainer.optimizer", after)]).trainer
    for field in ("lr", "schedule", "decay_fraction", "momentum", "momentum_warmup_steps"):
        assert getattr(changed, field) == getattr(expected, field), field


MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"d_model": 64},
    "modern": {"architecture": "modern", "d_model": 1024},
    "weights": {"init": "some/directory"},
    "hf": {"name": "hf_causal_lm", "path": "some/model"},
}
RATES = {"adamw": 0.0006, "muon": 0.02, "adafactor": 0.0006}


def extended(base: dict[str, Any], changes: str, tmp_path: Path, notes: list[str]) -> Config:
    """`changes`: the trainer section of a document that extends the base."""
    import yaml

    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "own.yaml").write_text(f"extends: base.yaml\ntrainer: {changes}\n")
    return load_config(tmp_path / "own.yaml", on_note=notes.append)


@pytest.mark.parametrize("is_extended", [False, True])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("before", "after"), [("adamw", "muon"), ("muon", "adamw")])
def test_learning_rate_of_another_optimizer_is_replaced_and_noted(
    tmp_path: Path, model: str, before: str, after: str, is_extended: bool
) -> None:
    """Not for weights that exist: there the default would be too high."""
    document = {"model": MODELS[model], "trainer": {"optimizer": before, "lr": RATES[before]}}
    notes: list[str] = []
    if is_extended:
        rate = extended(document, f"{{optimizer: {after}}}", tmp_path, notes).trainer.lr
    else:
        rate = load_config(document, [f"trainer.optimizer={after}"], on_note=notes.append).trainer.lr
    default = load_config({"model": MODELS[model], "trainer": {"optimizer": after}}).trainer.lr
    assert rate == (RATES[before] if model in ("weights", "hf") else default)
    assert len(notes) == 1
    assert str(RATES[before]) in notes[0]


def test_own_learning_rate_of_a_document_that_extends_is_kept(tmp_path: Path) -> None:
    notes: list[str] = []
    base = {"trainer": {"lr": 0.0006}}
    assert extended(base, "{optimizer: muon, lr: 0.0006}", tmp_path, notes).trainer.lr == 0.0006
    assert extended(base, "{optimizer: adafactor}", tmp_path, notes).trainer.lr == 0.0006
    assert extended(base, "{warmup_steps: 3}", tmp_path, notes).trainer.lr == 0.0006
    assert notes == []


@pytest.mark.parametrize("architecture", ["gpt2", "modern"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_null_means_the_default(architecture: str, optimizer: str) -> None:
    fields = ("lr", "schedule", "decay_fraction", "momentum", "momentum_warmup_steps")
    fields += ("micro_batch_size", "grad_accum_steps")
    document = {"model": {"architecture": architecture}, "trainer": {"optimizer": optimizer}}
    assert load_config(document, [f"trainer.{field}=null" for field in fields]) == load_config(document)
    for field in fields:
        assert load_config(document, [(f"trainer.{field}", None)]) == load_config(document), field


def test_overrides_decide() -> None:
    notes: list[str] = []
    overrides = ["trainer.optimizer=muon", "trainer.lr=0.003", "trainer.schedule=cosine"]
    trainer = load_config({}, overrides, on_note=notes.append).trainer
    assert (trainer.lr, trainer.schedule, notes) == (0.003, "cosine", [])
