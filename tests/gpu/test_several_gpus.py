"""Tests that need two GPUs in one machine. Not run in our CI: docs/guarantees.md."""

import pytest
from gpu_run import Train


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_gpus_with_reproducible_reduce_match_one(train: Train, optimizer: str) -> None:
    sets = ("distributed.strategy=ddp", "distributed.reproducible_reduce=true", f"trainer.optimizer={optimizer}")
    one = train(*sets, folder="one").json
    two = train(*sets, folder="two", processes=2).json
    assert two["world_size"] == 2
    assert two["state_sha256"] == one["state_sha256"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_gpus_differ_only_by_rounding(train: Train, strategy: str, optimizer: str) -> None:
    sets = (f"trainer.optimizer={optimizer}",)
    one = train(*sets, folder="one").json
    two = train(*sets, f"distributed.strategy={strategy}", folder="two", processes=2).json
    assert two["final_val_loss"] == pytest.approx(one["final_val_loss"], rel=1e-3)
    assert two["tokens"] == one["tokens"]


def test_run_on_two_gpus_resumes_on_one(train: Train) -> None:
    sets = ("distributed.strategy=fsdp",)
    assert train(*sets, processes=2, LLMTRAIN_FAULT="after_optimizer:7:0:term").code == 75
    one = train(*sets, resume="gpu").json
    assert one["resumed_from"] == 7
    assert one["steps"] == 12
