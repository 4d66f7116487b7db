"""Another optimizer for a recorded config, which has the defaults of the former one filled in."""

import pytest

from llmtrain.config.load import load_config


@pytest.mark.parametrize("architecture", ["gpt2", "modern"])
@pytest.mark.parametrize(("before", "after"), [("muon", "adamw"), ("adamw", "muon")])
def test_defaults_of_the_former_optimizer_are_replaced(architecture: str, before: str, after: str) -> None:
    document = {"model": {"name": "gpt", "architecture": architecture}, "trainer": {"micro_batch_size": 4}}
    recorded = load_config(document, [("trainer.optimizer", before)]).as_dict()
    changed = load_config(recorded, [("trainer.optimizer", after)]).trainer
    expected = load_config(document, [("trainer.optimizer", after)]).trainer
    for field in ("lr", "schedule", "decay_fraction", "momentum", "momentum_warmup_steps"):
        assert getattr(changed, field) == getattr(expected, field), field


def test_a_learning_rate_of_the_document_is_kept_and_noted() -> None:
    notes: list[str] = []
    config = load_config({"trainer": {"lr": 0.0006}}, ["trainer.optimizer=muon"], on_note=notes.append)
    assert config.trainer.lr == 0.0006
    assert len(notes) == 1
    assert "trainer.lr" in notes[0]


def test_overrides_decide() -> None:
    notes: list[str] = []
    overrides = ["trainer.optimizer=muon", "trainer.lr=0.003", "trainer.schedule=cosine"]
    trainer = load_config({}, overrides, on_note=notes.append).trainer
    assert (trainer.lr, trainer.schedule, notes) == (0.003, "cosine", [])
