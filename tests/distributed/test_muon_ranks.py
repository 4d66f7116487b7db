"""Muon on several processes: the matrices are shared out, and the result is that of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
import rank_harness as ranks
import torch
from torch import nn

from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.config.schema import Config
from llmtrain.distributed.parallel import FSDPModel, unshard
from llmtrain.distributed.world import World
from llmtrain.training.muon import Muon

MakeConfig = Callable[..., Config]
COMMON: dict[str, Any] = {
    "trainer__optimizer": "muon",
    "trainer__lr": 0.02,
    "trainer__momentum_warmup_steps": 4,
    "trainer__grad_accum_steps": 4,
    "trainer__eval_batches": 4,
}
EXACT = {"distributed__reproducible_reduce": True}
TERM = {"LLMTRAIN_FAULT": "after_optimizer:5:0:term"}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> MakeConfig:
    def config(**changes: Any) -> Config:
        return harness.tiny_config(tmp_path_factory.mktemp("muon") / "runs", cache, **{**COMMON, **changes})

    return config


@pytest.fixture(scope="module")
def alone(make: MakeConfig) -> dict[str, Any]:
    return ranks.trained(make(**EXACT), 1)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_muon_has_the_same_bits_on_any_world_size(make: MakeConfig, alone: dict[str, Any], size: int) -> None:
    result = ranks.trained(make(**EXACT), size)
    assert (result["world_size"], result["state_sha256"]) == (size, alone["state_sha256"])


def test_interrupted_muon_run_resumes_exactly_on_other_world_sizes(make: MakeConfig, alone: dict[str, Any]) -> None:
    config = make(**EXACT)
    assert [end.code for end in ranks.train_ranks(config, 2, env=TERM)] == [75, 75]
    assert ranks.trained(config, 1, harness.RUN_ID)["state_sha256"] == alone["state_sha256"]
    config = make(**EXACT)
    assert [end.code for end in ranks.train_ranks(config, 1, env=TERM)] == [75]
    assert ranks.trained(config, 2, harness.RUN_ID)["state_sha256"] == alone["state_sha256"]


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_muon_matches_one_process_to_rounding(make: MakeConfig, alone: dict[str, Any], strategy: str) -> None:
    """Interrupted on 2 processes and resumed on 3: with 32 rows, shards of 16 and of 11, 11 and 10."""
    config = make(distributed__strategy=strategy)
    assert [end.code for end in ranks.train_ranks(config, 2, env=TERM)] == [75, 75]
    result = ranks.trained(config, 3, harness.RUN_ID)
    for key in ("final_train_loss", "final_val_loss"):
        assert result[key] == pytest.approx(alone[key], rel=1e-4)
    saved = Checkpoint(Path(config.output.root_dir) / harness.RUN_ID / "checkpoints" / "step_8").tensors("optimizer")
    assert saved["state.h.0.attn.c_attn.weight.momentum_buffer"].shape == (96, 32)


class Fused(nn.Module):
    """Shapes whose shards end within a matrix, with fewer rows than ranks, and empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.parts = nn.ModuleList([nn.Linear(6, 14, bias=False), nn.Linear(14, 2, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def updated(world: World, is_sharded: bool) -> dict[str, torch.Tensor]:
    module = Fused()
    if is_sharded:
        FSDPModel(module, list(module.parts), world, "fp32")
    group = {"params": list(module.parameters()), "lr": 0.1, "weight_decay": 0.1, "momentum": 0.5}
    optimizer = Muon([group], [[8, 5, 1], []], world.rank, world.world_size, batched=False)
    for step in range(2):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        module(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: unshard(parameter.detach()).clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("is_sharded", [False, True])
def test_ranks_have_the_update_of_one_process(is_sharded: bool) -> None:
    expected = updated(World(), is_sharded=False)
    for found in ranks.values(ranks.run_ranks(3, lambda world: updated(world, is_sharded))):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5 if is_sharded else 0)
