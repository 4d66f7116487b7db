"""Settings that make a run fit."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.plan.plan_cases import CPU, GPT2, GPU, LLAMA, make_config, make_llama

from llmtrain.config.schema import Config
from llmtrain.core.gpus import find_gpu
from llmtrain.plan.find import Option, cheapest_change, find_options
from llmtrain.plan.memory_value import NCCL_BUFFERS
from llmtrain.plan.plan import Verdict, make_plan
from llmtrain.plan.target import Target

GPT = {**GPT2, "block_size": 512}
BATCH = make_config(GPT, micro_batch_size=64, grad_accum_steps=2)
SIZE = "trainer.micro_batch_size"
COUNT = "trainer.grad_accum_steps"


def target_for(config: Config, micro_batch: int) -> Target:
    """A GPU that this micro-batch just fits on."""
    plan = make_plan(config.with_values("trainer", micro_batch_size=micro_batch), GPU)
    assert plan.memory is not None
    assert plan.memory.needed is not None
    assert plan.memory.peak is not None
    limit = plan.memory.needed + plan.memory.peak * plan.memory.uncertainty
    return Target("cuda", int(limit) + 1, find_gpu("h200"))


def changed(config: Config, option: Option) -> Config:
    """The config as a user changes it with the settings of an option."""
    for name, value in option.settings.items():
        section, _, field = name.partition(".")
        config = config.with_values(section, **{field: value})
    return config


def test_micro_batch_is_the_largest_that_fits() -> None:
    target = target_for(BATCH, 16)
    assert make_plan(BATCH, target).verdict is not Verdict.FITS
    option = cheapest_change(BATCH, target)
    assert option is not None
    assert option.settings == {SIZE: 16, COUNT: 8}  # as many sequences per step as before
    assert option.processes_per_node is None
    assert option.arguments == f"--set {SIZE}=16 --set {COUNT}=8"
    assert make_plan(changed(BATCH, option), target).verdict is Verdict.FITS


def test_sequences_of_a_step_stay_the_same_where_they_do_not_divide() -> None:
    config = make_config(GPT, micro_batch_size=30)
    option = cheapest_change(config, target_for(config, 16))
    assert option is not None
    assert option.settings == {SIZE: 15, COUNT: 2}


def test_run_that_fits_needs_no_change() -> None:
    option = cheapest_change(BATCH, replace(GPU, memory_bytes=80 * 10**9))
    assert option is not None
    assert (option.settings, option.arguments) == ({}, "nothing to change")


def test_every_option_fits_and_the_fastest_comes_first() -> None:
    whole = make_plan(BATCH, CPU).memory
    assert whole is not None
    assert whole.peak is not None
    target = Target("cpu", whole.peak)  # which is less than with the uncertainty
    options = find_options(BATCH, target)
    assert len(options) == 3  # without and with both kinds of checkpointing
    costs = []
    for option in options:
        assert option.plan.verdict is Verdict.FITS
        again = make_plan(changed(BATCH, option), target)
        assert again.verdict is Verdict.FITS
        assert again.memory == option.plan.memory
        assert option.plan.time is not None
        assert option.plan.time.tokens_per_second
        costs.append(1 / option.plan.time.tokens_per_second)
    assert costs == sorted(costs)


@pytest.mark.slow
def test_states_that_do_not_fit_are_sharded() -> None:
    config = make_config(
        {**GPT2, "n_layers": 8, "d_model": 1024, "n_heads": 16}, micro_batch_size=1, grad_accum_steps=8
    )
    option = cheapest_change(config, replace(GPU, memory_bytes=int(2.2e9)))
    assert option is not None
    assert option.settings["distributed.strategy"] == "fsdp"
    assert option.processes_per_node in (2, 4, 8)


def test_nothing_fits() -> None:
    tiny = replace(GPU, memory_bytes=1000, processes_per_node=2)
    assert cheapest_change(BATCH, tiny) is None
    assert find_options(BATCH, tiny) == []


def test_batch_that_grows_with_the_processes_keeps_its_micro_batch() -> None:
    config = make_config(GPT, micro_batch_size=64, scale_batch=True)
    for option in find_options(config, target_for(config, 32)):
        assert SIZE not in option.settings


def test_cpu_has_neither_fsdp_nor_quantization() -> None:
    for option in find_options(make_config(GPT, micro_batch_size=8), CPU):
        assert option.processes_per_node is None
        assert "distributed.strategy" not in option.settings


@pytest.mark.slow
@pytest.mark.hf
def test_llama_that_fits_only_with_adapters_is_offered_lora_and_qlora(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    fields = {"vocab_size": 300, "hidden_size": 512, "intermediate_size": 2048}
    config = make_config(make_llama(tmp_path, LLAMA | fields), micro_batch_size=1, precision="bf16")
    adapted = make_config(
        {**make_llama(tmp_path, LLAMA | fields), "dtype": "bfloat16", "lora": {}}, micro_batch_size=1, precision="bf16"
    )
    memory = (target_for(adapted, 1).memory_bytes or 0) + NCCL_BUFFERS + 10**7
    many = replace(GPU, memory_bytes=memory, processes_per_node=8)  # fsdp is tried on more only
    options = find_options(config.with_values("trainer", grad_accum_steps=8), many)
    assert options
    assert all("model.lora.rank" in option.settings for option in options)
    assert any("model.lora.quantize" in option.settings for option in options)
    muon = make_config(GPT, optimizer="muon")
    assert all("model.lora.rank" not in option.settings for option in find_options(muon, GPU))
