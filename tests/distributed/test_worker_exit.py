"""What stands for all processes of a node, and whether another start is worth it."""

import signal
from dataclasses import replace
from typing import Any

import pytest

from llmtrain.distributed.worker_exit import is_worth_a_restart, log_restart, overall
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
TOLD = (75, Interrupted("t."))
LOST = (75, PeerLost("p."))
SUPERSEDED = (75, Superseded("s."))
CRASH = (1, None)
SEVEN = (7, None)
KILLED = (-9, None)
SEGFAULT = (-11, None)
STOPPED = (-15, None)  # by us, after another had failed
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
        ((TOLD, NAN), 65, TrainingFailed, 1, False),
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
        ((TOLD, TOLD), 75, Interrupted, 0, False),
        ((TOLD, LOST), 75, Interrupted, 0, False),
        ((LOST, TOLD), 75, Interrupted, 1, False),
        ((TOLD, CRASH), 1, LlmtrainError, 1, False),
        ((LOST, FINISHED, TOLD, STOPPED), 75, Interrupted, 2, False),
        ((SUPERSEDED, LOST), 75, Superseded, 0, False),
        ((FOREIGN_75, FINISHED), 75, Interrupted, 0, False),
        ((FINISHED, SEVEN), 7, LlmtrainError, 1, True),
        ((FINISHED, STOPPED), 143, LlmtrainError, 1, True),
        ((STOPPED, STOPPED), 143, LlmtrainError, 0, True),
        ((USAGE,), 64, UsageError, None, False),
        ((KILLED,), 137, LlmtrainError, 0, True),
    ],
)
def test_one_for_all(rows: Any, code: int, kind: type[LlmtrainError], rank: int | None, again: bool) -> None:
    error = overall(workers(*rows))
    assert error is not None
    assert type(error) is kind
    assert error.exit_code == code
    assert is_worth_a_restart(workers(*rows)) == again
    if kind not in (Interrupted,) and rank is not None:
        assert f"rank {rank}" in error.what
    if rank is None:
        assert "rank" not in error.what, "with one process there is nothing to tell apart"


def test_a_worker_that_the_agent_stopped_does_not_prevent_a_restart() -> None:
    told = Interrupted("t.").as_dict()
    assert is_worth_a_restart([worker(0, -9), replace(worker(1, 75, told), was_stopped=True)])
    assert not is_worth_a_restart([worker(0, -9), worker(1, 75, told)])


@pytest.mark.parametrize("rows", [(), (FINISHED,), (FINISHED, FINISHED)])
def test_all_finished(rows: Any) -> None:
    assert overall(workers(*rows)) is None


def test_the_class_keeps_its_own_code() -> None:
    """One error's exit code is set on it alone."""
    overall(workers(KILLED))
    assert (LlmtrainError.exit_code, Interrupted.exit_code) == (1, 75)


def test_what_a_worker_said_comes_out_whole() -> None:
    said = UsageError("wrong size.", known=["b", "a"], remedy="Do it.")
    said.details = {"run_id": "r", "steps": 4}
    error = overall([worker(0, 75, PeerLost("p.").as_dict()), worker(1, 64, said.as_dict())])
    assert error is not None
    assert error.as_dict() == {**said.as_dict(), "what": "rank 1: wrong size.", "rank": 1}
    assert "Do it." in str(error)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, ["was ended by SIGKILL", "out of memory"]),
        (-11, ["was ended by SIGSEGV"]),
        (7, ["crashed with exit code 7"]),
        (75, ["exit code 75"]),
    ],
)
def test_a_worker_without_a_word_is_told_by_its_code(code: int, words: list[str]) -> None:
    error = overall([worker(2, code)])
    assert error is not None
    for word in ["rank 2", *words]:
        assert word in error.what


def test_a_signal_without_a_name() -> None:
    error = overall([worker(0, -(signal.SIGRTMIN + 3))])
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
def test_a_strange_report(report: dict[str, Any]) -> None:
    """Of another version, or of a script that uses the name `llmtrain`."""
    error = overall([worker(0, 3, report)])
    assert isinstance(error, LlmtrainError)
    assert error.exit_code == 3


def test_a_restart_is_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="llmtrain"):
        log_restart(workers(LOST, KILLED), 2)
    assert "rank 1 was ended by SIGKILL" in caplog.text
    assert "2 restarts left" in caplog.text
