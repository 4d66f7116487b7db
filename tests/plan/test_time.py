"""Time of planned runs: from FLOPs against what was measured, and from finished runs by the rule of history.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.core.gpus import find_gpu
from llmtrain.plan.history import PastRun, nearest_run, past_runs, read_past_run, shape_of
from llmtrain.plan.target import ModelSize, Target
from llmtrain.plan.time import TimeEstimate, estimate_time, find_match
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.metadata import cpu_name

H200 = Target("cuda", None, find_gpu("h200"))
CPU = Target("cpu", None)
SMALL = ModelSize(124_000_000, 124_000_000, 8.55e8, 12)
MEDIUM = ModelSize(354_000_000, 354_000_000, 2.43e9, 24)
LLAMA = ModelSize(1_235_800_000, 1_235_800_000, 8.22e9, 16)
LORA = ModelSize(1_247_100_000, 11_300_000, 5.82e9, 16)
GPT2: dict[str, Any] = {"name": "gpt", "n_layers": 12, "d_model": 768, "n_heads": 12, "block_size": 1024}
MODERN: dict[str, Any] = {"name": "gpt", "architecture": "modern", "size": "124m", "block_size": 1024}
HF: dict[str, Any] = {"name": "hf_causal_lm", "path": "/models/llama", "block_size": 2048}
EXAMPLES = {"name": "instruct_jsonl", "train_file": "examples.jsonl"}
FAST = {"precision": "bf16", "compile": True, "grad_accum_steps": 1}


def config(model: dict[str, Any], data: dict[str, Any] | None = None, **trainer: Any) -> Config:
    document: dict[str, Any] = {"model": model, "trainer": {**FAST, **trainer}}
    if data:
        document["data"] = data
    return load_config(document, for_launch=True)


def estimate(made: Config, size: ModelSize, target: Target = H200, **options: Any) -> TimeEstimate:
    tokens = made.trainer.micro_batch_size * made.trainer.grad_accum_steps * made.model.block_size
    match = find_match(made, target, size, options.get("history", ()))
    return estimate_time(made, target, size, tokens, options.get("steps", 100), match)


@pytest.mark.parametrize(
    ("made", "size", "measured"),
    [  # one H200, bf16, compiled: docs/experiments.md
        (config(GPT2, micro_batch_size=64), SMALL, 552_049),
        (config(MODERN, micro_batch_size=64), SMALL, 593_223),
        (config(MODERN, micro_batch_size=16), SMALL, 534_905),
        (config(MODERN, micro_batch_size=16, optimizer="muon"), SMALL, 475_759),
        (config(MODERN, micro_batch_size=8, optimizer="muon"), SMALL, 352_554),
        (config({**MODERN, "size": "350m"}, micro_batch_size=16, optimizer="muon"), MEDIUM, 172_460),
        (config({**GPT2, "n_layers": 24, "d_model": 1024, "n_heads": 16}, micro_batch_size=64), MEDIUM, 199_816),
        (config(HF, EXAMPLES, micro_batch_size=8), LLAMA, 64_890),
        (config({**HF, "lora": {}}, EXAMPLES, micro_batch_size=8), LORA, 88_157),
    ],
)
def test_estimate_from_flops_is_near_what_was_measured(made: Config, size: ModelSize, measured: float) -> None:
    found = estimate(made, size)
    assert found.tokens_per_second == pytest.approx(measured, rel=0.2)
    assert found.uncertainty_text == "±40 %"
    assert found.source == "from FLOPs, at 47 % of the peak of h200-141g"


def test_parts_of_an_estimate_agree() -> None:
    found = estimate(config(GPT2, micro_batch_size=64, eval_batches=10, eval_every_steps=40), SMALL, steps=100)
    assert found.tokens == 6_553_600
    assert found.tokens_per_second is not None
    assert found.training_seconds == pytest.approx(found.tokens / found.tokens_per_second)
    assert found.seconds_per_step == pytest.approx(65536 / found.tokens_per_second)
    # 40, 80 and 100: 10 batches each, and a third of a training step's FLOPs per token.
    assert found.evaluating_seconds == pytest.approx(30 * 65536 / 3 / found.tokens_per_second)
    assert found.saves == 3
    assert found.first_step_seconds is None
    assert set(found.unknown) == {"first_step_seconds", "saving_seconds"}
    assert found.total_seconds == pytest.approx(found.training_seconds + found.evaluating_seconds)
    assert json.loads(json.dumps(found.as_dict()))["total_seconds"] == found.total_seconds


def test_what_makes_training_slower() -> None:
    base = estimate(config(GPT2, micro_batch_size=64), SMALL)

    def ratio(**trainer: Any) -> float:
        found = estimate(config(GPT2, **{"micro_batch_size": 64, **trainer}), SMALL)
        assert found.tokens_per_second is not None
        assert base.tokens_per_second is not None
        return found.tokens_per_second / base.tokens_per_second

    assert ratio(compile=False) < 0.7
    assert ratio(precision="fp32") < 0.15
    assert ratio(activation_checkpointing="blocks") == pytest.approx(0.75, abs=0.01)
    assert 0.75 < ratio(activation_checkpointing="selective") < 1
    assert ratio(micro_batch_size=1) < 0.6  # kernels have to be launched, whatever their size


def test_processes_scale_with_a_loss_and_more_uncertainty() -> None:
    made = config(GPT2, micro_batch_size=16, grad_accum_steps=16)
    speeds = {}
    for nodes, processes in ((1, 1), (1, 8), (2, 8)):
        found = estimate(made, SMALL, replace(H200, nodes=nodes, processes_per_node=processes))
        assert found.tokens_per_second is not None
        speeds[nodes * processes] = (found.tokens_per_second, found.uncertainty)
    assert 6.5 < speeds[8][0] / speeds[1][0] < 7.5
    assert 12 < speeds[16][0] / speeds[1][0] < 13
    assert [uncertainty for _, uncertainty in speeds.values()] == [0.4, 0.5, 0.6]


@pytest.mark.parametrize(
    ("target", "reason"),
    [(Target("cuda", 24 << 30), "only the memory"), (Target("cuda", None, find_gpu("t4")), "no bfloat16")],
)
def test_unknown_speed_is_said(target: Target, reason: str) -> None:
    found = estimate(config(GPT2, micro_batch_size=4), SMALL, target)
    assert (found.tokens_per_second, found.training_seconds, found.uncertainty) == (None, None, None)
    assert found.total_seconds is None
    assert reason in found.source
    assert reason in found.unknown["tokens_per_second"]


def test_unknown_steps_and_tokens_are_said() -> None:
    found = estimate_time(config(GPT2, micro_batch_size=64), H200, SMALL, None, None)
    assert found.tokens_per_second is not None
    assert found.training_seconds is None
    assert {"steps", "tokens", "seconds_per_step", "saves"} <= set(found.unknown)
    assert all(found.unknown.values())


def test_cpu_without_history_is_within_a_factor_of_two() -> None:
    found = estimate(config(GPT2, precision="fp32", micro_batch_size=1), SMALL, CPU)
    assert found.uncertainty_text == "within a factor of 2"


def past(made: Config, **values: Any) -> PastRun:
    base = PastRun(
        run_id="first",
        shape=shape_of(made.as_dict(), 1),
        device_name="NVIDIA H200",
        is_gpu=True,
        threads=8,
        world_size=1,
        parameters=SMALL.parameters,
        trained=SMALL.trained,
        tokens_per_second=500_000.0,
        peak_memory_bytes=30 << 30,
        first_step_seconds=40.0,
        seconds_per_save=2.0,
        seconds_per_evaluation=3.0,
    )
    return replace(base, **values)


def test_run_of_the_same_shape_is_used() -> None:
    made = config(GPT2, micro_batch_size=64, save_every_steps=50, eval_every_steps=None)
    found = estimate(made, SMALL, steps=200, history=[past(made)])
    assert found.tokens_per_second == 500_000
    assert (found.source, found.run_id) == ("from run first on 1 x H200", "first")
    assert found.uncertainty_text == "±5 %"
    assert (found.first_step_seconds, found.saving_seconds, found.evaluating_seconds) == (40, 8, 3)
    assert found.total_seconds == pytest.approx(40 + 8 + 3 + 200 * 65536 / 500_000)
    assert found.saving_share == pytest.approx(8 / found.total_seconds)
    assert found.unknown == {}


def test_fields_that_do_not_decide_the_speed_may_differ() -> None:
    made = config(GPT2, micro_batch_size=64)
    other = config({**GPT2, "init": "/models/gpt2"}, micro_batch_size=64, lr=1e-5, max_steps=7)
    assert estimate(made, SMALL, history=[past(other)]).uncertainty == 0.05


@pytest.mark.parametrize(
    ("trainer", "uncertainty", "difference"),
    [
        ({"micro_batch_size": 32}, 0.15, "micro-batch 32"),
        ({"micro_batch_size": 16}, 0.25, "micro-batch 16"),
        ({"micro_batch_size": 8}, None, ""),
        ({"grad_accum_steps": 4}, 0.10, "4 micro-batches per process and step"),
        ({"optimizer": "muon"}, 0.10, "muon"),
        ({"compile": False}, None, ""),
        ({"precision": "fp32"}, None, ""),
        ({"activation_checkpointing": "blocks"}, None, ""),
    ],
)
def test_rule_for_near_runs(trainer: dict[str, Any], uncertainty: float | None, difference: str) -> None:
    made = config(GPT2, micro_batch_size=64)
    old = config(GPT2, **{"micro_batch_size": 64, **trainer})
    found = estimate(made, SMALL, history=[past(old)])
    if uncertainty is None:
        assert found.run_id is None
        assert "FLOPs" in found.source
        return
    assert found.uncertainty == uncertainty
    assert found.source == f"from run first on 1 x H200 with {difference}"


@pytest.mark.parametrize(
    "other",
    [
        {"device_name": "NVIDIA L4"},
        {"device_name": "NVIDIA New 9000"},
        {"parameters": 1},
        {"trained": 1},
        {"is_gpu": False, "device_name": "x86"},
    ],
)
def test_other_devices_and_sizes_say_nothing(other: dict[str, Any]) -> None:
    made = config(GPT2, micro_batch_size=64)
    assert estimate(made, SMALL, history=[past(made, **other)]).run_id is None


def test_nearest_and_newest_run_is_used() -> None:
    made = config(GPT2, micro_batch_size=64)
    far = past(config(GPT2, micro_batch_size=32), run_id="far")
    history = [past(made, run_id="old"), past(made, run_id="new"), far]
    assert estimate(made, SMALL, history=history).run_id == "new"


def test_run_on_other_number_of_processes_is_scaled() -> None:
    made = config(GPT2, micro_batch_size=16, grad_accum_steps=8)
    old = past(config(GPT2, micro_batch_size=16, grad_accum_steps=4), world_size=4, tokens_per_second=400_000.0)
    old = replace(old, shape=shape_of(config(GPT2, micro_batch_size=16, grad_accum_steps=4).as_dict(), 4))
    found = estimate(made, SMALL, replace(H200, processes_per_node=8), history=[old])
    assert found.tokens_per_second == 800_000
    assert found.uncertainty == 0.15
    assert found.source == "from run first on 4 x H200"


def test_on_a_cpu_threads_and_name_must_be_equal() -> None:
    made = config(GPT2, precision="fp32", compile=False, micro_batch_size=2)
    shape = shape_of(made.as_dict(), 1)
    run = past(made, is_gpu=False, device_name="Some CPU", threads=2)
    for cpu, expected in ((("Some CPU", 2), 0.10), (("Some CPU", 4), None), (("Other CPU", 2), None)):
        match = nearest_run([run], shape, CPU, SMALL, cpu)
        assert (match.uncertainty if match else None) == expected


def finished(root: Path, name: str, **result: Any) -> RunDirectory:
    run = root / name
    run.mkdir(parents=True)
    made = config(GPT2, micro_batch_size=64)
    (run / "config.yaml").write_text(json.dumps(made.as_dict()))  # JSON is YAML
    (run / "meta.json").write_text(json.dumps({"run_id": name}))
    values = {"steps": 50, "resumed_from": None, "tokens_per_second": 1000.0, "device": "cuda:0", "world_size": 1}
    values |= {"device_name": "NVIDIA H200", "threads": 2, "parameters": 124_000_000}
    values |= {"trainable_parameters": 124_000_000, "peak_memory_bytes": 5}
    values["timing"] = {"first_step": 4.0, "saving": 3.0, "saves": 2, "evaluating": 1.0, "evaluations": 0}
    (run / "finished.json").write_text(json.dumps({**values, **result}))
    return RunDirectory(run)


def test_finished_runs_are_read(tmp_path: Path) -> None:
    finished(tmp_path, "first")
    finished(tmp_path, "short", steps=4)
    finished(tmp_path, "resumed", steps=50, resumed_from=48)
    finished(tmp_path, "older", device_name=None)
    finished(tmp_path, "damaged").finished.write_text("{")
    finished(tmp_path, "running").finished.unlink()
    (run,) = past_runs(str(tmp_path))
    assert (run.run_id, run.tokens_per_second, run.peak_memory_bytes) == ("first", 1000, 5)
    assert (run.first_step_seconds, run.seconds_per_save, run.seconds_per_evaluation) == (4, 1.5, None)
    assert run.shape == shape_of(config(GPT2, micro_batch_size=64).as_dict(), 1)
    assert past_runs(str(tmp_path / "none")) == []


def test_damaged_values_are_not_an_error(tmp_path: Path) -> None:
    run = finished(tmp_path, "first", timing=[1], parameters="many", peak_memory_bytes=None)
    found = read_past_run(run)
    assert found is not None
    assert (found.parameters, found.first_step_seconds) == (0, None)


def test_negative_values_do_not_count(tmp_path: Path) -> None:
    timing = {"first_step": -4.0, "saving": -3.0, "saves": 2, "evaluating": 1.0, "evaluations": -1}
    found = read_past_run(finished(tmp_path, "first", timing=timing, peak_memory_bytes=-5))
    assert found is not None
    assert (found.peak_memory_bytes, found.first_step_seconds) == (None, None)
    assert (found.seconds_per_save, found.seconds_per_evaluation) == (None, None)
    assert read_past_run(finished(tmp_path, "second", tokens_per_second=-4.0)) is None


def test_this_machine_has_a_name() -> None:
    assert cpu_name()
