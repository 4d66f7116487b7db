"""Errors in logs of images of 0.1.0, which write no exit reports."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kube_runs import STEP
from why_runs import WATCHDOG

from llmtrain.compat.logged_errors import classify, last_error
from llmtrain.errors import LlmtrainError


def test_last_error_reads_watchdog_lines_of_json_and_other_ranks() -> None:
    message = WATCHDOG.removeprefix("[DDP] ")
    for line in (
        json.dumps({"tag": "DDP", "message": message}),
        f"[DDP] [rank 2] {message}",
        f"stopped: rank 0: {message}",
    ):
        report = last_error([STEP.format(1), line])
        assert report is not None
        assert (report.silent_ranks, report.reason) == ((1,), "no_progress")


def test_last_error_reads_the_watchdogs_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmtrain.training import watchdog

    errors: list[LlmtrainError] = []
    monkeypatch.setattr(watchdog, "exit_now", errors.append)
    world: Any = SimpleNamespace(rank=0, world_size=2)
    watchdog.Watchdog(tmp_path, world, 1, 5.0)._give_up(5.0)
    report = last_error([f"[DDP] {errors[0].what} {errors[0].remedy}"])
    assert report is not None
    assert (report.message, report.remedy, report.silent_ranks) == (errors[0].what, errors[0].remedy, (1,))


def test_last_error_reads_the_join_error() -> None:
    from llmtrain.distributed.rendezvous import _Failure, _join_error

    error = _join_error("demo-0.demo", 29500, _Failure("name", "the name demo-0.demo does not resolve: x"), 600.0)
    report = last_error(f"error: {error}".splitlines())
    assert report is not None
    assert (report.message, report.remedy, report.reason) == (error.what, error.remedy, error.reason)


@pytest.mark.parametrize(("line", "expected"), [
    ("The loss of step 8 is nan;", "not_finite"),
    ("The validation loss after step 8 is nan.", "not_finite"),
    ("Out of GPU memory in step 8", "gpu_memory"),
    ("The checkpoint of step 8 could not be written", "disk_full"),
    ("None of the 8 checkpoints in /out/demo/checkpoints is", "CheckpointError"),
    ("crashed 3 times in a row without a newer checkpoint", "gave_up"),
    ("8 of 8 processes never came: rank 8", "processes_missing"),
    ("did not find each other at", "JoinError"),
])  # fmt: skip
def test_classify_reads_messages_of_the_first_version(line: str, expected: str) -> None:
    """Its images write no report; these are its messages, which have changed since."""
    report = classify(line)
    assert expected in (report.reason, report.error)
