"""The same config gives the same run bit for bit, and a step does not depend on its split into micro-batches."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
import torch
from fault_harness import RUN_ID

from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.config.schema import Config
from llmtrain.runs.metrics import read_metrics

MakeConfig = Callable[..., Config]


def trained(config: Config, **options: Any) -> dict[str, Any]:
    ended = harness.run(config, **options)
    assert ended.code == 0, ended.output
    assert ended.result is not None
    return ended.result


def final_model(config: Config) -> dict[str, torch.Tensor]:
    folder = Path(config.output.root_dir) / RUN_ID / "checkpoints"
    return Checkpoint(folder / f"step_{config.trainer.max_steps}").tensors("model")


def rows(config: Config) -> list[tuple[int, tuple[str, ...]]]:
    return harness.train_rows(Path(config.output.root_dir) / RUN_ID)


def test_same_config_gives_the_same_run(make_config: MakeConfig) -> None:
    first, second = make_config(), make_config()
    results = trained(first), trained(second)
    assert results[0]["state_sha256"] == results[1]["state_sha256"]
    assert results[0]["sample"] == results[1]["sample"]
    assert rows(first) == rows(second)


def test_state_hash_covers_parameters_and_optimizer(make_config: MakeConfig) -> None:
    """Runs that differ only in the last step have different hashes, and so have equal weights with other optimizer
    states."""
    from llmtrain.checkpoint.state import state_sha256

    config = make_config()
    result = trained(config)
    folder = Path(config.output.root_dir) / RUN_ID / "checkpoints" / "step_8"
    model, optimizer = Checkpoint(folder).tensors("model"), Checkpoint(folder).tensors("optimizer")
    assert state_sha256(model, optimizer) == result["state_sha256"]
    name = next(name for name in optimizer if "exp_avg" in name)
    optimizer[name].view(-1)[0] += 1e-6
    assert state_sha256(model, optimizer) != result["state_sha256"]


def test_another_seed_gives_another_run(make_config: MakeConfig) -> None:
    first, second = make_config(), make_config(run__seed=8)
    results = trained(first), trained(second)
    assert results[0]["state_sha256"] != results[1]["state_sha256"]
    assert rows(first)[0] != rows(second)[0]


@pytest.mark.parametrize("change", [{"trainer__log_every_steps": 3}, {"run__name": "other"}])
def test_fields_that_do_not_affect_the_result(make_config: MakeConfig, change: dict[str, Any]) -> None:
    assert trained(make_config(**change))["state_sha256"] == trained(make_config())["state_sha256"]


def test_evaluation_and_saving_do_not_affect_training(make_config: MakeConfig) -> None:
    rarely = make_config(trainer__eval_every_steps=None, trainer__save_every_steps=None)
    often = make_config(trainer__eval_every_steps=1, trainer__save_every_steps=1)
    assert trained(rarely)["state_sha256"] == trained(often)["state_sha256"]
    assert rows(rarely) == rows(often)


def test_gradient_accumulation_does_not_change_the_step(make_config: MakeConfig) -> None:
    """4 x 2 and 8 x 1 sequences are the same step but for rounding: samples, mean, gradient, update."""
    cut = make_config(trainer__micro_batch_size=4, trainer__grad_accum_steps=2, model__dropout=0.0)
    whole = make_config(trainer__micro_batch_size=8, trainer__grad_accum_steps=1, model__dropout=0.0)
    results = trained(cut), trained(whole)
    losses = [[float.fromhex(values[0]) for _, values in rows(config)] for config in (cut, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    norms = [[float.fromhex(values[2]) for _, values in rows(config)] for config in (cut, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert results[0]["tokens"] == results[1]["tokens"]
    models = final_model(cut), final_model(whole)
    for name, tensor in models[0].items():
        torch.testing.assert_close(tensor, models[1][name], rtol=0, atol=2e-4, msg=name)


def test_losses_fall(make_config: MakeConfig) -> None:
    result = trained(make_config(trainer__max_steps=40, trainer__lr=1e-2, trainer__save_every_steps=None))
    assert result["final_train_loss"] < 0.7 * result["first_train_loss"]
    assert result["final_val_loss"] < 0.7 * result["first_train_loss"]
    assert result["best_val_loss"] <= result["final_val_loss"]


def test_bf16_trains(make_config: MakeConfig) -> None:
    changes = {"trainer__lr": 1e-2, "trainer__save_every_steps": None, "trainer__eval_batches": 1}
    config = make_config(trainer__precision="bf16", **changes)
    result = trained(config, before=harness.emulate_bf16)
    assert result["final_train_loss"] < 0.95 * result["first_train_loss"]
    plain = trained(make_config(**changes))
    assert result["state_sha256"] != plain["state_sha256"]
    assert result["final_val_loss"] == pytest.approx(plain["final_val_loss"], rel=0.05)
    assert {tensor.dtype for tensor in final_model(config).values()} == {torch.float32}


def test_bf16_falls_back_to_float32_without_cpu_support(make_config: MakeConfig) -> None:
    def without() -> None:
        from llmtrain.models import device_precision

        device_precision.has_bf16 = lambda _: False

    config = make_config(trainer__precision="bf16")
    ended = harness.run(config, before=without)
    assert ended.result, ended.output
    assert ended.result["state_sha256"] == trained(make_config())["state_sha256"]
    assert ended.output.count("bfloat16") == 1, "one warning"
    assert ended.result["precision"] == "fp32", "what it computed in"
    assert "mkldnn" not in ended.output
    assert config.trainer.precision == "bf16"
    recorded = harness.checkpoints(Path(config.output.root_dir))[-1].state()["config"]
    assert recorded["trainer"]["precision"] == "bf16", "a machine with bf16 can resume it"


@pytest.mark.parametrize(
    "change",
    [
        {"trainer__optimizer": "adafactor"},
        {"trainer__precision": "bf16"},
        pytest.param({"model__name": "dummy_gpt"}, marks=pytest.mark.slow),
        {"model__tie_embeddings": False},
        {"trainer__schedule": "wsd", "trainer__decay_fraction": 0.5},
        # with a test of its own, test_sigterm_and_sigkill_with_data_workers
        pytest.param({"data__num_workers": 1}, marks=pytest.mark.slow),
        pytest.param({"trainer__max_grad_norm": None}, marks=pytest.mark.slow),
        {"run__deterministic": True},
        pytest.param({"trainer__log_every_steps": 3}, marks=pytest.mark.slow),
        {"data__name": "text_files", "data__tokenizer": "char", "trainer__micro_batch_size": 16},
    ],
    ids=lambda change: "-".join(f"{key.split('__')[1]}={value}" for key, value in change.items()),
)
def test_every_kind_of_run_resumes_exactly(make_config: MakeConfig, tmp_path: Path, change: dict[str, Any]) -> None:
    """In the last case the text is so short that an epoch ends within the run."""
    if "data__name" in change:
        text = tmp_path / "text.txt"
        text.write_text("".join(f"{number} times {number} is {number * number}\n" for number in range(150)))
        assert text.stat().st_size / 16 < 8 * 2 * 16
        change = {**change, "data__files": [str(text)]}
    uninterrupted = make_config(**change)
    expected = harness.outcome(Path(uninterrupted.output.root_dir), trained(uninterrupted))
    config = make_config(**change)
    assert harness.run(config, fault="after_optimizer:5:0:kill").code == -9
    root = Path(config.output.root_dir)
    assert harness.outcome(root, trained(config, resume=RUN_ID)) == expected


def test_adafactor_trains(make_config: MakeConfig) -> None:
    config = make_config(trainer__optimizer="adafactor", trainer__max_steps=40, trainer__lr=3e-2)
    result = trained(config)
    assert result["final_train_loss"] < 0.9 * result["first_train_loss"]


def test_deterministic_enables_deterministic_algorithms(make_config: MakeConfig) -> None:
    def settings() -> dict[str, Any]:
        import os

        from torch.backends import cudnn

        return {
            "algorithms": torch.are_deterministic_algorithms_enabled(),
            "benchmark": cudnn.benchmark,
            "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            "torch_threads": torch.get_num_threads(),
        }

    on = trained(make_config(run__deterministic=True), after=settings)
    assert (on["algorithms"], on["benchmark"], on["cublas"]) == (True, False, ":4096:8")
    off = trained(make_config(run__deterministic=False), after=settings)
    assert (off["algorithms"], off["cublas"]) == (False, None)
    assert on["torch_threads"] == off["torch_threads"] == 1
    assert on["state_sha256"] == off["state_sha256"], "a CPU run is exact without it"


def test_partial_evaluation_always_reads_the_same_batches(make_config: MakeConfig) -> None:
    """With a tiny learning rate the model does not change, so its validation loss must not either."""
    config = make_config(
        trainer__lr=1e-30, trainer__weight_decay=0.0, trainer__eval_every_steps=1, trainer__eval_batches=4
    )
    trained(config)
    found = harness.val_rows(Path(config.output.root_dir) / RUN_ID)
    assert [step for step, _ in found] == list(range(1, 9))
    assert len({loss for _, loss in found}) == 1


def test_full_evaluation_does_not_depend_on_the_batch_size(make_config: MakeConfig) -> None:
    """The last, short batch is padded with samples that must not count."""
    losses = []
    for size in (3, 16):
        config = make_config(
            trainer__lr=1e-30,
            trainer__weight_decay=0.0,
            trainer__max_steps=1,
            trainer__warmup_steps=0,
            trainer__eval_batches=None,
            trainer__micro_batch_size=size,
        )
        losses.append(trained(config)["final_val_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_first_loss_and_learning_rates_are_logged(make_config: MakeConfig) -> None:
    from llmtrain.training.schedule import lr_at

    config = make_config()
    result = trained(config)
    found = [row for row in read_metrics(Path(config.output.root_dir) / RUN_ID / "metrics.jsonl") if "train/lr" in row]
    assert [row["train/lr"] for row in found] == [lr_at(step, config.trainer) for step in range(8)]
    assert found[0]["train/loss"] == result["first_train_loss"]
    assert found[-1]["train/loss"] == result["final_train_loss"]


def test_logged_loss_is_the_mean_since_the_last_line(make_config: MakeConfig) -> None:
    """8 steps, logged at 3, 6 and 8; the summary has the means of the first and the last window."""
    every, third = make_config(), make_config(trainer__log_every_steps=3)
    trained(every)
    result = trained(third)
    steps = [float.fromhex(values[0]) for _, values in rows(every)]
    windows = [steps[0:3], steps[3:6], steps[6:8]]
    logged = {step: float.fromhex(values[0]) for step, values in rows(third)}
    assert list(logged) == [3, 6, 8]
    assert list(logged.values()) == pytest.approx([sum(window) / len(window) for window in windows], rel=1e-12)
    assert (result["first_train_loss"], result["final_train_loss"]) == (logged[3], logged[8])


def test_bits_per_byte_of_a_byte_tokenizer(make_config: MakeConfig) -> None:
    """A token is a byte, except that between documents."""
    config = make_config()
    result = trained(config)
    metrics = read_metrics(Path(config.output.root_dir) / RUN_ID / "metrics.jsonl")
    found = [row for row in metrics if "val/loss" in row]
    assert [row["val/bits_per_byte"] for row in found] == pytest.approx(
        [row["val/loss"] / math.log(2) for row in found], rel=0.02
    )
    assert result["final_bits_per_byte"] == found[-1]["val/bits_per_byte"]
    assert result["first_val_loss"] == found[0]["val/loss"]


@pytest.mark.slow
def test_compiled_training(make_config: MakeConfig) -> None:
    """torch.compile: the same run to rounding, and a resumed compiled run is exact."""
    plain = trained(make_config(model__dropout=0.0))
    compiled = make_config(trainer__compile=True, model__dropout=0.0)
    child = harness.start(compiled)
    ended = child.wait(timeout=240)
    assert ended.code == 0, ended.output
    expected = harness.outcome(Path(compiled.output.root_dir), ended.result)
    assert ended.result["final_train_loss"] == pytest.approx(plain["final_train_loss"], rel=1e-3)

    again = make_config(trainer__compile=True, model__dropout=0.0)
    assert harness.start(again, fault="after_optimizer:5:0:kill").wait(timeout=240).code == -9
    ended = harness.start(again, RUN_ID).wait(timeout=240)
    assert ended.code == 0, ended.output
    assert harness.outcome(Path(again.output.root_dir), ended.result) == expected
