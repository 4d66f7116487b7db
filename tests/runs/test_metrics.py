import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.runs import metrics as metrics_module
from llmtrain.runs.metrics import MetricsLog, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(path: Path, *steps: int, keep: int = 0) -> None:
    log = MetricsLog(path, keep, keep)
    for step in steps:
        log.append({"step": step, "train/loss": step / 10})
    log.sync()
    log.close()


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path)]


def test_rows_are_read_in_order(path: Path) -> None:
    write(path, 1, 2, 3)
    assert list(read_metrics(path)) == [{"step": s, "train/loss": s / 10} for s in (1, 2, 3)]


def test_row_is_readable_before_close(path: Path) -> None:
    log = MetricsLog(path, 0, 0)
    log.append({"step": 1})
    assert steps(path) == [1]
    log.close()


def test_resume_drops_rows_of_repeated_steps(path: Path) -> None:
    write(path, 1, 2, 3, 4)
    write(path, 3, 4, 5, keep=2)
    assert steps(path) == [1, 2, 3, 4, 5]


def test_all_rows_of_the_last_kept_step_stay(path: Path) -> None:
    write(path, 1, 2, 2, 3)
    write(path, keep=2)
    assert steps(path) == [1, 2, 2]


@pytest.mark.parametrize("torn", ['{"step": 3, "train/lo', "{", "null", "[1, 2]", '"text"'])
def test_incomplete_last_line_is_skipped_and_removed(path: Path, torn: str) -> None:
    write(path, 1, 2)
    with path.open("a") as file:
        file.write(torn)
    assert steps(path) == [1, 2]
    write(path, 3, keep=2)
    assert steps(path) == [1, 2, 3]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_invalid_utf8_is_skipped(path: Path) -> None:
    write(path, 1, 2)
    with path.open("ab") as file:
        file.write(b'{"step": 3, "x": "\xff"}\n')
    assert steps(path)[:2] == [1, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_value_becomes_null(path: Path, value: float) -> None:
    log = MetricsLog(path, 0, 0)
    log.append({"step": 1, "val/loss": value})
    log.close()
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"step": 1, "val/loss": None}


def test_missing_file_has_no_rows(path: Path) -> None:
    assert list(read_metrics(path)) == []


class Failing:
    """Replaces a function of os: fails in some calls, before or after doing its work."""

    def __init__(self, real: Callable[..., int], calls: set[int], number: int, part: float = 0.0) -> None:
        self.real, self.calls, self.number, self.part, self.count = real, calls, number, part, 0

    def __call__(self, descriptor: int, *arguments: Any) -> int:
        self.count += 1
        if self.count not in self.calls:
            return self.real(descriptor, *arguments)
        if arguments and self.part:
            data, offset = arguments
            return self.real(descriptor, data[: int(len(data) * self.part)], offset)
        raise OSError(self.number, os.strerror(self.number))


FAILURES = {
    "one fsync": ("fsync", {1}, errno.EIO, 0.0),
    "every fsync": ("fsync", set(range(1, 1000)), errno.EIO, 0.0),
    "a write": ("pwrite", {3}, errno.EIO, 0.0),
    "writes for a while": ("pwrite", {2, 3, 4, 5, 6, 7}, errno.ENOSPC, 0.0),
    "half a write": ("pwrite", {4}, errno.ENOSPC, 0.5),
    "several half writes": ("pwrite", {4, 5, 6}, errno.ENOSPC, 0.9),
}


@pytest.mark.parametrize("name", FAILURES)
def test_write_errors_neither_lose_nor_duplicate_rows(path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    function, calls, number, part = FAILURES[name]
    log = MetricsLog(path, 0, 0)
    failing = Failing(getattr(os, function), calls, number, part)
    monkeypatch.setattr(metrics_module.os, function, failing)
    for step in range(1, 13):
        log.append({"step": step, "train/loss": step / 10})
        assert steps(path) == list(range(1, len(steps(path)) + 1)), "whole rows, in order"
        if step % 5 == 0:
            log.sync()
    log.close()
    assert failing.count >= min(calls)
    assert path.read_text().splitlines() == [json.dumps({"step": s, "train/loss": s / 10}) for s in range(1, 13)]


def test_rows_are_written_again_after_a_failed_fsync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux drops pages that it could not write, and the next fsync succeeds."""
    log = MetricsLog(path, 0, 0)
    log.append({"step": 1})
    log.sync()
    log.append({"step": 2})
    whole = path.read_bytes()
    real = os.fsync

    def drop(descriptor: int) -> None:
        monkeypatch.setattr(metrics_module.os, "fsync", real)
        os.ftruncate(descriptor, len(b'{"step": 1}\n'))
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(metrics_module.os, "fsync", drop)
    log.sync()
    assert path.read_bytes() == whole
    log.append({"step": 3})
    log.close()
    assert steps(path) == [1, 2, 3]


def test_rows_in_memory_are_limited(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "SYNC_BYTES", 100)
    log = MetricsLog(path, 0, 0)
    for step in range(100):
        log.append({"step": step})
        assert len(log._rows) <= 100
    log.close()
    assert steps(path) == list(range(100))
