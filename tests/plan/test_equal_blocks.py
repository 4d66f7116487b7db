"""Models with many equal blocks: the trace of a few of them against that of all."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.plan.plan_cases import GPT2, GPU, LLAMA, MODERN, make_config, make_llama

from llmtrain.config.schema import Config
from llmtrain.plan import memory
from llmtrain.plan.equal_blocks import equal_blocks
from llmtrain.plan.fake_model import fake_model
from llmtrain.plan.memory import trace_step
from llmtrain.plan.target import Target
from llmtrain.plan.trace import Trace

LAYERS = 9


def both(config: Config, monkeypatch: pytest.MonkeyPatch, target: Target = GPU) -> tuple[Trace, Trace]:
    model = fake_model(config, target.device)
    blocks = equal_blocks(model.module)
    assert blocks is not None
    few = trace_step(config, model, target)
    assert len(blocks) == LAYERS  # restored
    monkeypatch.setattr(memory, "equal_blocks", lambda _: None)
    return few, trace_step(config, model, target)


@pytest.mark.parametrize(
    ("model", "trainer"),
    [
        (GPT2, {}),
        (MODERN, {"micro_batch_size": 1}),  # gradients are larger than activations
        (GPT2, {"micro_batch_size": 1, "grad_accum_steps": 2}),
        (GPT2, {"activation_checkpointing": "blocks"}),
        (MODERN, {"micro_batch_size": 16, "activation_checkpointing": "selective"}),
        (GPT2, {"compile": True}),
    ],
    ids=str,
)
def test_peak_is_that_of_all_blocks(
    model: dict[str, Any], trainer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, whole = both(make_config({**model, "n_layers": LAYERS}, **trainer), monkeypatch)
    assert few.peak_bytes == whole.peak_bytes
    assert few.parts == whole.parts


@pytest.mark.hf
@pytest.mark.parametrize(
    "lora", [pytest.param(None, id="full", marks=pytest.mark.slow), pytest.param({"rank": 4}, id="lora")]
)
def test_peak_of_llama_is_that_of_all_blocks(
    lora: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    section = {**make_llama(tmp_path, LLAMA | {"num_hidden_layers": LAYERS}), "lora": lora}
    few, whole = both(make_config(section, precision="bf16"), monkeypatch)
    assert few.peak_bytes == whole.peak_bytes


def test_peak_of_fsdp_is_that_of_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config({**GPT2, "n_layers": LAYERS}, grad_accum_steps=2, distributed={"strategy": "fsdp"})
    few, whole = both(config, monkeypatch, replace(GPU, processes_per_node=2))
    assert few.peak_bytes == whole.peak_bytes


def test_few_blocks_are_traced_as_they_are() -> None:
    assert equal_blocks(fake_model(make_config(GPT2), "cuda").module) is None


def test_blocks_that_differ_are_traced_as_they_are() -> None:
    module = fake_model(make_config({**GPT2, "n_layers": LAYERS}), "cuda").module
    blocks = equal_blocks(module)
    assert blocks is not None
    blocks[5].requires_grad_(False)
    assert equal_blocks(module) is None
