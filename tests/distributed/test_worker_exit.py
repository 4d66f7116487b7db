"""The error that represents all workers of a node, and whether they are restarted."""

import signal
from dataclasses import replace
from typing import Any

import pytest

from llmtrain.distributed.worker_exit import is_restartable, log_restart, merge_exits
from llmtrain.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Interrupted,
    JoinError,
    LlmtrainError,
    PeerLost,
    Superseded,
    TrainingFailed,
    UsageError,
)
from llmtrain.runs.exit_report import ExitReport

FINISHED = (0, None)
USAGE = (64, UsageError("u."))
CONFIG = (64, ConfigError("c.yaml", ["x"]))
DATA = (65, DataError("d."))
CHECKPOINT = (65, CheckpointError("c."))
NAN = (65, TrainingFailed("n."))
JOIN = (69, JoinError("j."))
INTERRUPTED = (75, Interrupted("t."))
LOST = (75, PeerLost("p."))
SUPERSEDED = (75, Superseded("s."))
CRASH = (1, None)
SEVEN = (7, None)
KILLED = (-9, None)
SEGFAULT = (-11, None)
STOPPED = (-15, None)  # by the agent, after another had failed
FOREIGN_64 = (64, None)
FOREIGN_75 = (75, None)


def worker(rank: int, code: int, error: dict[str, Any] | None = None) -> ExitReport:
    return ExitReport.of_worker(rank, code, error)


def workers(*rows: tuple[int, LlmtrainError | None]) -> list[ExitReport]:
    return [worker(rank, code, error.as_dict() if error else {}) for rank, (code, error) in enumerate(rows)]


@pytest.mark.parametrize(
    ("rows", "code", "kind", "rank", "again"),
    [
        ((USAGE, USAGE), 64, UsageError, 0, False),
        ((CONFIG, LOST), 64, UsageError, 0, False),
        ((LOST, DATA), 65, DataError, 1, False),
        ((CRASH, CHECKPOINT), 65, CheckpointError, 1, False),
        ((INTERRUPTED, NAN), 65, TrainingFailed, 1, False),
        ((KILLED, USAGE), 64, UsageError, 1, False),
        ((FOREIGN_64, KILLED), 64, LlmtrainError, 0, False),
        ((STOPPED, USAGE), 64, UsageError, 1, False),
        ((LOST, CRASH), 1, LlmtrainError, 1, True),
        ((KILLED, LOST), 137, LlmtrainError, 0, True),
        ((LOST, SEGFAULT), 139, LlmtrainError, 1, True),
        ((LOST, SEVEN, STOPPED), 7, LlmtrainError, 1, True),
        ((STOPPED, KILLED), 137, LlmtrainError, 1, True),
        ((JOIN, JOIN), 69, JoinError, 0, True),
        ((LOST, LOST), 75, PeerLost, 0, True),
        ((FINISHED, LOST), 75, PeerLost, 1, True),
        ((LOST, STOPPED), 75, PeerLost, 0, True),
        ((INTERRUPTED, INTERRUPTED), 75, Interrupted, 0, False),
        ((INTERRUPTED, LOST), 75, Interrupted, 0, False),
        ((LOST, INTERRUPTED), 75, Interrupted, 1, False),
        ((INTERRUPTED, CRASH), 1, LlmtrainError, 1, False),
        ((LOST, FINISHED, INTERRUPTED, STOPPED), 75, Interrupted, 2, False),
        ((SUPERSEDED, LOST), 75, Superseded, 0, False),
        ((FOREIGN_75, FINISHED), 75, Interrupted, 0, False),
        ((FINISHED, SEVEN), 7, LlmtrainError, 1, True),
        ((FINISHED, STOPPED), 143, LlmtrainError, 1, True),
        ((STOPPED, STOPPED), 143, LlmtrainError, 0, True),
        ((USAGE,), 64, UsageError, None, False),
        ((KILLED,), 137, LlmtrainError, 0, True),
    ],
)
def test_merge_exits_picks_most_severe(
    rows: Any, code: int, kind: type[LlmtrainError], rank: int | None, again: bool
) -> None:
    error = merge_exits(workers(*rows))
    assert error is not None
    assert type(error) is kind
    assert error.exit_code == code
    assert is_restartable(workers(*rows)) == again
    if kind not in (Interrupted,) and rank is not None:
        assert f"rank {rank}" in error.what
    if rank is None:
        assert "rank" not in error.what, "a single process is not named"


def test_worker_stopped_by_agent_does_not_prevent_restart() -> None:
    interrupted = Interrupted("t.").as_dict()
    assert is_restartable([worker(0, -9), replace(worker(1, 75, interrupted), was_stopped=True)])
    assert not is_restartable([worker(0, -9), worker(1, 75, interrupted)])


@pytest.mark.parametrize("rows", [(), (FINISHED,), (FINISHED, FINISHED)])
def test_merge_exits_of_finished_workers_is_none(rows: Any) -> None:
    assert merge_exits(workers(*rows)) is None


def test_exit_code_is_set_on_the_instance_only() -> None:
    merge_exits(workers(KILLED))
    assert (LlmtrainError.exit_code, Interrupted.exit_code) == (1, 75)


def test_merged_error_keeps_all_fields_of_the_report() -> None:
    original = UsageError("wrong size.", known=["b", "a"], remedy="Do it.")
    original.details = {"run_id": "r", "steps": 4}
    error = merge_exits([worker(0, 75, PeerLost("p.").as_dict()), worker(1, 64, original.as_dict())])
    assert error is not None
    assert error.as_dict() == {**original.as_dict(), "what": "rank 1: wrong size.", "rank": 1}
    assert "Do it." in str(error)


@pytest.mark.parametrize(
    ("code", "facts"),
    [(-9, ["SIGKILL", "out of memory"]), (-11, ["SIGSEGV"]), (7, ["exit code 7"]), (75, ["exit code 75"])],
)
def test_worker_without_report_is_described_by_its_code(code: int, facts: list[str]) -> None:
    error = merge_exits([worker(2, code)])
    assert error is not None
    for fact in ["rank 2", *facts]:
        assert fact in error.what


def test_realtime_signal() -> None:
    error = merge_exits([worker(0, -(signal.SIGRTMIN + 3))])
    assert error is not None
    assert error.exit_code == 128 + signal.SIGRTMIN + 3


@pytest.mark.parametrize(
    "report",
    [
        {"error": "NoSuchError", "what": "x."},
        {"a": 1},
        {"error": "nearest", "what": "x."},
    ],
)
def test_malformed_report(report: dict[str, Any]) -> None:
    """From another version, or from a script that uses the key `llmtrain`."""
    error = merge_exits([worker(0, 3, report)])
    assert isinstance(error, LlmtrainError)
    assert error.exit_code == 3


def test_restart_is_logged_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="llmtrain"):
        log_restart(workers(LOST, KILLED), 2)
    assert "rank 1 was killed by SIGKILL" in caplog.text
    assert "2 restarts left" in caplog.text


def test_merged_error_of_a_run_that_gave_up_names_the_last_crash() -> None:
    crash = log_restart([worker(1, 1, LlmtrainError("ValueError: my cause").as_dict())], remaining=0)
    gave_up = TrainingFailed("Crashed 3 times.", reason="gave_up").as_dict()
    error = merge_exits([worker(0, 65, gave_up), worker(1, 65, gave_up)], last_crash=crash)
    assert error is not None
    assert "ValueError: my cause" in error.what
