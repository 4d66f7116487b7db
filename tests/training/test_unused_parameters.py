"""Models with trained parameters that get no gradient: they train, also with ddp, and resume exactly."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_harness import train_ranks, trained
from torch import nn

from llmtrain.data.batches import Batch
from llmtrain.training.unused_parameters import unused_parameters
from slow_cases import some

PLUGIN = """
import torch
from pydantic import BaseModel
from torch import nn

from llmtrain.models.base import ModelAdapter


class Net(nn.Module):
    def __init__(self, vocab_size, kind):
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(vocab_size, 8)
        self.extra = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])  # what muon trains
        self.head = nn.Linear(8, vocab_size)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids):
        if self.training:
            self.calls += 1
        x = self.blocks[0](self.embedding(ids))
        is_used = {
            "always": True,
            "never": False,
            "late": self.calls > 6,
            "early": self.calls < 3,
            "odd": self.calls % 2 == 1,
        }[self.kind]
        if is_used:
            x = x + self.extra[1](self.extra[0](x))
        return self.head(x)


class Model(ModelAdapter):
    class Options(BaseModel):
        kind: str = "never"

    def build(self):
        return Net(self.vocab_size, self.options.kind)
"""


@pytest.fixture(autouse=True)
def _plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unused_plugin.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def plugin_config(make_config: Any, kind: str, **changes: Any) -> Any:
    model = {"model__name": "unused_plugin:Model", "model__options": {"kind": kind}}
    return make_config(**model, **{"trainer__eval_every_steps": None, "trainer__warmup_steps": 0, **changes})


def add_path() -> None:
    sys.path.insert(0, str(Path.cwd()))


def hashes(config: Any, ranks: int, stop_at: int | None = None) -> Any:
    """The hash of a run; with `stop_at`, of one that ended there first and was resumed."""
    if stop_at is None:
        return trained(config, ranks, before=add_path)["state_sha256"]
    trained(config.with_values("trainer", max_steps=stop_at, schedule_steps=8), ranks, before=add_path)
    return trained(config.with_values("trainer", schedule_steps=8), ranks, "auto", before=add_path)["state_sha256"]


KINDS = [(kind, optimizer) for kind in ("never", "late") for optimizer in ("adamw", "adafactor")]


@pytest.mark.parametrize("case", some(KINDS, ("never", "adafactor"), ("late", "adamw")), ids="-".join)
def test_resume_is_exact(make_config: Any, case: tuple[str, str]) -> None:
    """`late`: the layer is first used after the checkpoint was saved."""
    kind, optimizer = case
    changes = {"trainer__optimizer": optimizer}
    whole = hashes(plugin_config(make_config, kind, **changes), 1)
    assert hashes(plugin_config(make_config, kind, **changes), 1, stop_at=2) == whole
    assert hashes(plugin_config(make_config, "always", **changes), 1) != whole


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_processes_train_and_resume(make_config: Any, strategy: str) -> None:
    changes = {"distributed__strategy": strategy}
    whole = hashes(plugin_config(make_config, "never", **changes), 2)
    assert hashes(plugin_config(make_config, "never", **changes), 2, stop_at=4) == whole


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="ddp"),
        pytest.param({"distributed__reproducible_reduce": True}, id="reproducible", marks=pytest.mark.slow),
        pytest.param({"trainer__optimizer": "muon"}, id="muon", marks=pytest.mark.slow),
    ],
)
def test_unused_parameters_are_named_once(make_config: Any, changes: dict[str, Any]) -> None:
    ended = train_ranks(plugin_config(make_config, "never", **changes), 2, before=add_path)
    lines = [line for line in ended[0].output.splitlines() if "no gradient" in line]
    assert len(lines) == 1
    assert "144 of" in lines[0]
    assert lines[0].endswith(": extra")


def test_ddp_refuses_a_parameter_that_is_not_used_any_more(make_config: Any) -> None:
    """Before the optimizer uses gradients that were not exchanged: nothing is saved."""
    config = plugin_config(make_config, "early", trainer__save_every_steps=1, distributed__timeout_sec=20)
    ended = train_ranks(config, 2, before=add_path)
    errors = [end.error for end in ended if end.error]
    assert errors[0][0] == "UsageError"
    assert errors[0][2] == 64
    assert "distributed.find_unused_parameters" in errors[0][1]
    assert "extra.0.weight" in errors[0][1]
    resumable = config.with_values("distributed", find_unused_parameters=True)
    assert trained(resumable, 2, "auto", before=add_path)["steps"] == 8


def test_ddp_refuses_a_parameter_that_only_earlier_micro_batches_use(make_config: Any) -> None:
    config = plugin_config(make_config, "odd", trainer__grad_accum_steps=4, distributed__timeout_sec=20)
    errors = [end.error for end in train_ranks(config, 2, before=add_path) if end.error]
    assert errors[0][0] == "UsageError"
    assert "last micro-batch" in errors[0][1]
    assert ": ." not in errors[0][1]
    resumable = config.with_values("distributed", find_unused_parameters=True)
    assert trained(resumable, 2, "auto", before=add_path)["steps"] == 8


class Counting(nn.Module):
    """Dropout draws random numbers, batch norm changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.unused = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 10))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(self.embedding(ids).transpose(1, 2)).transpose(1, 2))
        return result


def test_the_search_changes_neither_buffers_nor_random_state() -> None:
    from llmtrain.config.model import GptSection
    from llmtrain.models.base import ModelAdapter

    class Adapter(ModelAdapter):
        def build(self) -> nn.Module:
            return Counting()

    module, ids = Counting(), torch.arange(8).view(2, 4)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    random_state = torch.get_rng_state()
    batch = Batch(ids, ids, 8, 0, 8)
    assert unused_parameters(Adapter(GptSection(), 10), module, batch) == ["unused.weight", "unused.bias"]
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    assert all(parameter.grad is None for parameter in module.parameters())
