"""Memory of a planned run: what follows from shapes, against real models and optimizers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plan.plan_cases import CPU, GPT2, GPU, LLAMA, MODERN, make_config, make_llama

from llmtrain import registry
from llmtrain.config.schema import Config
from llmtrain.distributed.world import World
from llmtrain.plan.fake_model import QUANTIZED_BYTES, fake_model
from llmtrain.plan.memory import Memory, estimate_memory
from llmtrain.plan.plan import Verdict, make_plan
from llmtrain.plan.states import training_bytes
from llmtrain.plan.target import Target
from llmtrain.training.optimizer import build_optimizer

PLUGIN = """
import torch
from torch import nn
from llmtrain.models.base import ModelAdapter

class Net(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 8)

    def forward(self, tokens):
        x = self.embedding(tokens)
        if x.sum().item() > 1e9:  # needs a value
            x = x * 2
        return x @ self.embedding.weight.T

class Adapter(ModelAdapter):
    def build(self):
        return Net(self.vocab_size)
"""


def estimated(config: Config, target: Target = GPU, saves: int | None = None) -> Memory:
    return estimate_memory(config, fake_model(config, target.device), target, saves)


def real_states(config: Config) -> dict[str, int]:
    """Bytes after a real step with the optimizer of training."""
    adapter = registry.resolve("model.name", config.model.name, registry.MODELS)(config.model, 0)
    adapter.prepare_for(torch.device("cpu"), False)
    module = adapter.build_empty()
    if getattr(config.model, "dtype", "float32") == "bfloat16":
        has_lora = getattr(config.model, "lora", None) is not None
        for parameter in module.parameters():
            if not (has_lora and parameter.requires_grad):
                parameter.data = parameter.data.to(torch.bfloat16)
    optimizer = build_optimizer(adapter, module, config.trainer, World())
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = 0
    for state in optimizer.state.values():
        states += sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0)
    return {
        "weights": sum(parameter.nbytes for parameter in module.parameters()),
        "gradients": sum(parameter.nbytes for parameter in trained),
        "optimizer": states,
    }


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("model", [GPT2, MODERN], ids=["gpt2", "modern"])
def test_states_of_gpt_are_exact(model: dict[str, Any], optimizer: str) -> None:
    config = make_config(model, optimizer=optimizer)
    memory = estimated(config)
    assert {name: getattr(memory, name) for name in ("weights", "gradients", "optimizer")} == real_states(config)
    assert memory.checkpoint == memory.weights + memory.optimizer


@pytest.mark.hf
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "changes", [{}, {"dtype": "bfloat16"}, {"lora": {"rank": 4}}, {"lora": {"rank": 4}, "dtype": "bfloat16"}]
)
def test_states_of_llama_are_exact(changes: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    config = make_config({**make_llama(tmp_path, LLAMA | {"tie_word_embeddings": tied}), **changes})
    memory = estimated(config)
    assert {name: getattr(memory, name) for name in ("weights", "gradients", "optimizer")} == real_states(config)


@pytest.mark.hf
def test_states_of_adafactor_are_negligible(tmp_path: Path) -> None:
    config = make_config(make_llama(tmp_path), optimizer="adafactor")
    real = real_states(config)
    memory = estimated(config)
    assert (memory.weights, memory.gradients) == (real["weights"], real["gradients"])
    assert 0 < memory.optimizer < memory.weights / 20
    assert real["optimizer"] < 0.1 * memory.weights  # a tiny model: rows and columns are short


@pytest.mark.hf
def test_frozen_weights_are_stored_as_they_are_computed_with(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = {**make_llama(tmp_path), "lora": {"rank": 4}}
    as_float32 = fake_model(make_config(model, precision="fp32"), "cuda")
    as_bf16 = fake_model(make_config(model, precision="bf16"), "cuda")
    frozen = as_float32.weight_bytes - as_float32.trained_bytes
    assert as_bf16.trained_bytes == as_float32.trained_bytes
    assert as_bf16.weight_bytes - as_bf16.trained_bytes == frozen // 2


@pytest.mark.hf
def test_quantized_weights_take_half_a_byte_and_their_scales(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = {**make_llama(tmp_path), "dtype": "bfloat16"}
    lora = estimated(make_config({**model, "lora": {"rank": 4}}, precision="bf16"))
    qlora = estimated(make_config({**model, "lora": {"rank": 4, "quantize": True}}, precision="bf16"))
    width, inner, layers = LLAMA["hidden_size"], LLAMA["intermediate_size"], LLAMA["num_hidden_layers"]
    linear = layers * (3 * width * width + 3 * width * inner)  # q, o, and k and v of half the width; gate, up, down
    assert lora.weights - qlora.weights == pytest.approx(linear * (2 - QUANTIZED_BYTES), abs=layers * 8)
    assert qlora.optimizer == lora.optimizer


def test_gradients_of_accumulation_and_of_reproducible_sums() -> None:
    one = estimated(make_config(GPT2))
    four = estimated(make_config(GPT2, grad_accum_steps=4))
    tree = estimated(make_config(GPT2, grad_accum_steps=4, distributed={"reproducible_reduce": True}))
    assert four.gradients == one.gradients
    assert one.peak is not None
    assert four.peak is not None
    assert four.peak > one.peak  # all gradients exist while the next micro-batch is computed
    assert tree.gradients == 3 * one.gradients  # a path of a tree with four leaves


def test_fsdp_holds_a_shard_and_whole_blocks() -> None:
    fsdp = {"strategy": "fsdp"}
    whole = estimated(make_config(GPT2, grad_accum_steps=4))
    config = make_config(GPT2, grad_accum_steps=4, distributed=fsdp)
    shard = estimated(config, replace(GPU, processes_per_node=4))
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(shard, name) == getattr(whole, name) // 4
    assert shard.gathered > 0
    assert shard.checkpoint == whole.checkpoint
    assert estimated(config).gathered == 0  # one process shards nothing


def test_disk_counts_what_is_kept_and_what_is_being_written() -> None:
    keeps_two = make_config(GPT2, keep_checkpoints=2)
    size = estimated(keeps_two).checkpoint
    assert estimated(keeps_two, saves=10).disk == 4 * size
    assert estimated(keeps_two, saves=1).disk == size
    keeps_all = make_config(GPT2, keep_checkpoints="all")
    assert estimated(keeps_all, saves=10).disk == 10 * size
    assert estimated(keeps_all).disk is None


def test_states_are_those_of_the_formula_without_torch() -> None:
    config = make_config(GPT2, optimizer="muon")
    model = fake_model(config, "cuda")
    memory = estimated(config)
    states = training_bytes("muon", model.size.trained, model.matrices)
    assert memory.gradients + memory.optimizer == states


def test_model_that_needs_values_has_an_unknown_peak(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workdir / "needs_values.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(workdir)
    config = make_config({"name": "needs_values:Adapter", "block_size": 16, "vocab_size": 300})
    plan = make_plan(config, GPU)
    assert plan.verdict is Verdict.UNKNOWN
    assert plan.memory is not None
    assert (plan.memory.activations, plan.memory.peak, plan.memory.needed) == (None, None, None)
    assert plan.memory.unknown.keys() == {"activations", "peak"}
    assert plan.memory.weights == 4 * 300 * 8
    small = make_plan(config, replace(GPU, memory_bytes=1000))
    assert small.verdict is Verdict.DOES_NOT_FIT  # without activations already


def test_verdict_depends_on_the_uncertainty() -> None:
    config = make_config(GPT2)
    memory = estimated(config)
    assert memory.needed is not None
    assert memory.peak is not None
    margin = memory.uncertainty * memory.peak
    expected = {
        memory.needed + margin + 1e6: Verdict.FITS,
        memory.needed + margin / 2: Verdict.TIGHT,
        memory.needed - 1e6: Verdict.DOES_NOT_FIT,
    }
    for limit, verdict in expected.items():
        assert make_plan(config, replace(GPU, memory_bytes=int(limit))).verdict is verdict
    assert make_plan(config, replace(GPU, memory_bytes=None)).verdict is Verdict.UNKNOWN


def test_processes_of_a_cpu_share_its_memory() -> None:
    config = make_config(GPT2, grad_accum_steps=4)
    alone = estimated(config, Target("cpu", 8 * 10**9))
    assert alone.peak is not None
    limit = int(2.5 * alone.peak)
    assert make_plan(config, Target("cpu", limit)).verdict is Verdict.FITS
    assert make_plan(config, Target("cpu", limit, processes_per_node=4)).verdict is Verdict.DOES_NOT_FIT


def test_huge_micro_batch_is_not_traced_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(GPT2, micro_batch_size=10**9)
    huge = estimate_memory(config, fake_model(config, "cuda"), GPU).activations
    assert huge is not None
    config = make_config(GPT2, micro_batch_size=24)
    exact = estimate_memory(config, fake_model(config, "cpu"), CPU).activations
    monkeypatch.setattr("llmtrain.plan.memory.CHUNK_ELEMENTS", {"cpu": 4800})  # at most 16 sequences
    extrapolated = estimate_memory(config, fake_model(config, "cpu"), CPU).activations
    assert extrapolated == pytest.approx(exact, rel=0.02)
    assert huge / 10**9 == pytest.approx(exact / 24, rel=0.5)
