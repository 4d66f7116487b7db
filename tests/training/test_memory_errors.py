"""Too little memory is an error with a remedy, also on a CPU."""

from typing import Any

import pytest
import torch

from llmtrain.config.load import load_config
from llmtrain.distributed.world import World
from llmtrain.errors import UsageError
from llmtrain.training import memory_errors
from llmtrain.training.build import build_adapter, build_components
from llmtrain.training.memory_errors import check_memory, out_of_memory

GPT = ["model.name=gpt", "model.architecture=modern", "model.d_model=64", "model.n_layers=2"]
BYTES = {"adamw": 16, "muon": 12, "adafactor": 8}  # per weight


@pytest.mark.parametrize("optimizer", BYTES)
@pytest.mark.parametrize(("strategy", "processes"), [("ddp", 1), ("ddp", 2), ("fsdp", 2)])
def test_model_that_cannot_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, strategy: str, processes: int
) -> None:
    config = load_config(None, [*GPT, f"trainer.optimizer={optimizer}", f"distributed.strategy={strategy}"])
    adapter = build_adapter(config, 256)
    count = sum(parameter.numel() for parameter in adapter.build().parameters())
    assert adapter.weight_count() == count
    need = BYTES[optimizer] * count * (1 if strategy == "fsdp" else processes)
    world = World(device=torch.device("cpu"), world_size=processes, local_world_size=processes)
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: need)
    check_memory(config, adapter, world)
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: need - 1)
    with pytest.raises(
        UsageError, match=rf"does not fit.*{count:,} weights, their gradients and the state of {optimizer}"
    ):
        check_memory(config, adapter, world)
    check_memory(config, adapter, World(device=torch.device("cuda")))  # which has memory of its own


@pytest.mark.parametrize(("lora", "factor"), [(True, 1), (False, 4)])
def test_weights_of_a_pretrained_model_are_counted_in_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, lora: bool, factor: int
) -> None:
    from tiny_llama import make_model

    model = make_model(tmp_path / "model", hidden_size=64)
    sets = [
        "model.name=hf_causal_lm",
        f"model.path={model}",
        "trainer.optimizer=adamw",
        *(["model.lora.rank=4"] if lora else []),
    ]
    adapter = build_adapter(load_config(None, sets), 0)
    count = sum(parameter.numel() for parameter in adapter.build().parameters() if parameter.requires_grad or lora)
    assert adapter.weight_count() == pytest.approx(count, rel=0.1)  # the header of the file, or adapters, count too
    size = 4 * factor * (adapter.weight_count() or 0)
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: size - 1)
    with pytest.raises(UsageError, match="does not fit"):
        check_memory(load_config(None, sets), adapter, World(device=torch.device("cpu")))
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: size)
    check_memory(load_config(None, sets), adapter, World(device=torch.device("cpu")))


def test_training_checks_before_it_builds_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: 1000)
    config = load_config(None, [*GPT, "data.name=python_stdlib", "run.threads=1"])
    with pytest.raises(UsageError, match="does not fit"):
        build_components(config, World(device=torch.device("cpu")))


def test_failed_allocation_on_a_cpu() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert str(1 << 60) in str(out_of_memory(caught.value))


def test_failed_allocation_on_a_gpu() -> None:
    problem = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory 1 GiB")
    assert out_of_memory(problem) == "CUDA out of memory. Tried to allocate 2.00 GiB"


def test_other_errors_are_not_about_memory() -> None:
    assert out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
