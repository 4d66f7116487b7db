"""metrics.jsonl: always written, one JSON object per line, whatever other trackers do."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import fault_harness as harness
import pytest
from fault_harness import RUN_ID

from llmtrain.config.schema import Config
from llmtrain.runs.metrics import MetricsLog, read_metrics

MakeConfig = Callable[..., Config]


def test_rows_of_a_run(make_config: MakeConfig) -> None:
    config = make_config(trainer__log_every_steps=3)
    ended = harness.run(config)
    assert ended.code == 0, ended.output
    lines = (Path(config.output.root_dir) / RUN_ID / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [row["step"] for row in found if "train/loss" in row] == [3, 6, 8]
    assert [row["step"] for row in found if "val/loss" in row] == [4, 8]
    for row in found:
        assert row["time"] > 1.7e9
        if "train/loss" in row:
            expected = {"step", "time", "train/loss", "train/lr", "train/grad_norm", "train/tokens"}
            assert expected <= row.keys()
            assert row["train/tokens"] == row["step"] * 2 * 2 * 16
            assert row["train/grad_norm"] > 0
        else:
            assert {"val/loss", "val/perplexity", "val/is_best"} <= row.keys()
    assert found[-1]["val/loss"] == ended.result["final_val_loss"]


def test_repeated_steps_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0, 0)
    for step in range(1, 6):
        log.append({"step": step, "train/loss": float(step)})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 6, "train/lo')
    log = MetricsLog(path, 3, 3)
    log.append({"step": 4, "train/loss": 0.5})
    log.close()
    assert [(row["step"], row["train/loss"]) for row in read_metrics(path)] == [(1, 1), (2, 2), (3, 3), (4, 0.5)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_value_becomes_null(tmp_path: Path, value: float) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0, 0)
    log.append({"step": 1, "train/loss": value})
    log.close()
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"step": 1, "train/loss": None}


def test_rows_are_read_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0, 0)
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, 2.0**-30 * 3]
    for step, value in enumerate(values):
        log.append({"step": step, "x": value})
    log.close()
    assert [row["x"].hex() for row in read_metrics(path)] == [value.hex() for value in values]


@pytest.mark.parametrize("function", ["fsync", "pwrite"])
def test_single_storage_error_loses_no_row(make_config: MakeConfig, function: str) -> None:
    def fail_once() -> None:
        from types import SimpleNamespace

        from llmtrain.runs import metrics

        real, failed = getattr(os, function), []

        def fail(*arguments: object) -> object:
            if not failed:
                failed.append(True)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*arguments)

        metrics.os = SimpleNamespace(**{**vars(os), function: fail})

    config = make_config()
    ended = harness.run(config, before=fail_once)
    assert ended.code == 0, ended.output
    assert "metrics.jsonl (Input/output error)" in ended.output, "the error was injected"
    rows = list(read_metrics(Path(config.output.root_dir) / RUN_ID / "metrics.jsonl"))
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 9))
    assert [row["step"] for row in rows if "val/loss" in row] == [4, 8]
