"""`llmtrain smoke`: learns within a second and fails when gradients are lost."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_harness as ranks

from llmtrain.config.load import load_config
from llmtrain.distributed.parallel import ParallelModel
from llmtrain.training import smoke
from llmtrain.training.smoke import train_classifier

SMALL: dict[str, Any] = {"epochs": 2, "batch": 32, "samples": 256, "features": 16, "classes": 4, "lr": 3e-3, "seed": 42}


def train(count: int, strategy: str = "ddp", before: Any = None, **changes: Any) -> list[ranks.RankExit]:
    config = load_config("gpt_smoke", ["run.device=cpu", f"distributed.strategy={strategy}"])

    def body(_: int) -> Any:
        from llmtrain.core.logs import setup_logging

        setup_logging(config.logging)
        if before:
            before()
        return train_classifier(config.distributed, config.run, **{**SMALL, **changes})

    return ranks.start_ranks(count, body).wait()


def test_defaults_learn(cli) -> None:
    done = cli("smoke", "--json", "--set", "run.device=cpu")
    assert done.code == 0, done.err
    assert done.json["accuracy"] > 0.95
    assert done.json["final_loss"] < 0.5 * done.json["first_loss"]
    assert (done.json["world_size"], done.json["device"]) == (1, "cpu")


@pytest.mark.parametrize(
    ("count", "strategy"), [(2, "ddp"), (2, "fsdp"), pytest.param(4, "ddp", marks=pytest.mark.slow)]
)
def test_several_processes_match_one(count: int, strategy: str) -> None:
    (alone,) = ranks.values(train(1))
    first, *others = ranks.values(train(count, strategy))
    assert others == [None] * (count - 1)
    for name in ("first_loss", "final_loss"):
        assert first[name] == pytest.approx(alone[name], rel=1e-4)
    assert first["accuracy"] == pytest.approx(alone["accuracy"], abs=0.01)
    assert first["world_size"] == count


def test_log_has_tagged_lines(cli) -> None:
    done = cli("smoke", "--set", "run.device=cpu", "--samples", 512, "--batch", 64)
    assert done.code == 0
    assert "accuracy" in done.out
    lines = done.err.splitlines()
    for tag, count in (("[DDP] rank 0 of 1", 1), ("[TRAIN] epoch", 6), ("[EPOCH]", 2), ("[DONE] 2 epochs", 1)):
        assert len([line for line in lines if line.startswith(tag)]) == count, (tag, done.err)
    steps = [line for line in lines if line.startswith("[TRAIN]")]
    assert "epoch 1/2 | step 1/8" in steps[0]
    assert "epoch 2/2 | step 8/8" in steps[-1]


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (["--batch", "0"], "batch"),
        (["--batch", "300", "--samples", "200"], "--samples (200), got 300"),
        (["--epochs", "0"], "epochs"),
        (["--samples", "-4"], "samples"),
        (["--features", "0"], "features"),
        (["--classes", "1"], "classes"),
        (["--lr", "0"], "lr"),
        (["--lr", "fast"], "lr"),
        (["--seed", "-1"], "seed"),
        (["--processes", "0"], "processes"),
        (["--set", "distributed.strategy=magic"], "strategy"),
    ],
)
def test_bad_sizes_exit_64(cli, options: list[str], fact: str) -> None:
    done = cli("smoke", "--json", *options)
    assert done.code == 64
    assert fact in done.json["what"]
    assert "Traceback" not in done.err


def test_indivisible_batch_is_refused() -> None:
    ended = train(3)
    assert [end.code for end in ended] == [64] * 3
    assert all(end.error and end.error[0] == "UsageError" and "--batch" in end.error[1] for end in ended)


def test_fails_when_the_loss_does_not_fall() -> None:
    """A tiny learning rate has the effect of lost gradients."""
    ended = train(1, lr=1e-9, epochs=1, seed=3)
    if ended[0].code == 0:  # the last batch may be a lucky one
        ended = train(1, lr=1e-9, epochs=1, seed=4)
    assert ended[0].code == 65, ended[0].output
    assert "did not fall" in ended[0].output
    assert "llmtrain doctor" in ended[0].output


def test_lost_gradients_change_the_result() -> None:
    """Without the gradient exchange the result differs, which the comparison above would detect."""

    def forget() -> None:
        smoke.parallelize = lambda module, *_: ParallelModel(module)

    (alone,) = ranks.values(train(1))
    first, _ = ranks.values(train(2, before=forget))
    assert first["final_loss"] != pytest.approx(alone["final_loss"], rel=1e-4)


@pytest.mark.slow
def test_processes_option_prints_one_json_object(tmp_path: Path) -> None:
    """Real processes, started by the command itself."""
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", "smoke", "--processes", "2", "--json", "--samples", "512", "--epochs", "1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world_size"] == 2
    assert done.stderr.count("2 processes, backend gloo") == 1
    assert done.stderr.count("[DONE]") == 1


def test_single_step_is_refused(cli) -> None:
    done = cli("smoke", "--json", "--epochs", 1, "--samples", 256, "--batch", 256)
    assert done.code == 64, done.err
    assert "single step" in done.json["what"]
