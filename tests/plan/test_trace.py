"""A traced step on fake tensors, against the same step on real ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plan.plan_cases import CPU, GPT2, GPU, MODERN, make_config, make_llama

from llmtrain import registry
from llmtrain.config.schema import Config
from llmtrain.models.activation_checkpointing import checkpoint_blocks
from llmtrain.plan.fake_model import fake_model
from llmtrain.plan.memory import trace_step
from llmtrain.plan.target import Target
from llmtrain.plan.trace import GRADIENTS, OUTSIDE, MemoryTracker, Trace


def traced(config: Config, target: Target = CPU) -> Trace:
    return trace_step(config, fake_model(config, target.device), target)


def real_peak(config: Config) -> int:
    """The peak of the same step on tensors with values."""
    adapter = registry.resolve("model.name", config.model.name, registry.MODELS)(config.model, 0)
    adapter.prepare_for(torch.device("cpu"), False)
    module = adapter.build_empty()
    if hasattr(module, "has_linear_head"):
        module.has_linear_head = True
    kind = config.trainer.activation_checkpointing
    if kind != "none":
        checkpoint_blocks(adapter.blocks(module), kind == "selective", adapter.uses_dropout)
    tokens = torch.randint(3, 90, (config.trainer.micro_batch_size, config.model.block_size))
    tracker = MemoryTracker()
    for tensor in (*module.parameters(), *module.buffers()):
        tracker.ignore(tensor)
    with tracker:
        inputs = tokens.clone()
        targets = tokens.clone()
        adapter.loss(module, inputs, targets, None).backward()
    return tracker.result().peak_bytes


@pytest.mark.hf
@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
def test_peak_of_llama_is_that_of_real_tensors(lora: dict[str, Any] | None, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    config = make_config({**make_llama(tmp_path), "lora": lora})
    # transformers compares the positions to make a mask; a plan has it make none.
    assert traced(config).peak_bytes == pytest.approx(real_peak(config), rel=1e-3)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "blocks"])
@pytest.mark.parametrize("model", [GPT2, {**GPT2, "dropout": 0.1}, MODERN], ids=["gpt2", "dropout", "modern"])
def test_peak_of_gpt_is_that_of_real_tensors(model: dict[str, Any], checkpointing: str) -> None:
    config = make_config(model, activation_checkpointing=checkpointing)
    assert traced(config).peak_bytes == real_peak(config)


@pytest.mark.parametrize("model", [GPT2, MODERN], ids=["gpt2", "modern"])
def test_checkpointing_lowers_the_peak_on_a_gpu(model: dict[str, Any]) -> None:
    """Selective checkpointing keeps results of attention, also of the substitute for CUDA's."""
    small = {**model, "block_size": 256, "n_layers": 4}
    kinds = ("none", "selective", "blocks")
    peaks = [traced(make_config(small, activation_checkpointing=kind), GPU).peak_bytes for kind in kinds]
    assert peaks[0] > peaks[1] > peaks[2]


def test_parts_are_named_after_the_children_of_blocks() -> None:
    trace = traced(make_config(GPT2), GPU)
    assert {"attn", "mlp", OUTSIDE} <= trace.parts.keys()
    assert sum(trace.parts.values()) == trace.peak_bytes
    assert list(trace.parts.values()) == sorted(trace.parts.values(), reverse=True)


def test_gradients_of_the_micro_batch_before_are_counted() -> None:
    one = traced(make_config(GPT2), GPU)
    two = traced(make_config(GPT2, grad_accum_steps=2), GPU)
    assert GRADIENTS not in one.parts
    gradients = fake_model(make_config(GPT2), "cuda").trained_bytes
    assert two.parts[GRADIENTS] == pytest.approx(gradients, rel=0.02)  # sizes are rounded up
    assert two.peak_bytes > one.peak_bytes


def test_more_sequences_need_more_in_proportion() -> None:
    config = make_config({**GPT2, "n_layers": 2})
    peaks = [traced(config.with_values("trainer", micro_batch_size=size), GPU).peak_bytes for size in (8, 16, 32)]
    assert (peaks[2] - peaks[1]) == pytest.approx(2 * (peaks[1] - peaks[0]), rel=0.02)


def test_tracker_forgets_what_is_freed() -> None:
    tracker = MemoryTracker()
    with tracker:
        kept = torch.empty(1024)
        freed = torch.empty(4096)
        view = kept[:10]
        del freed
        torch.empty(512)
    assert tracker.live == 4096
    assert tracker.result().peak_bytes == 4096 + 16384
    assert view is not None
