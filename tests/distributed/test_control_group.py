"""Small messages between ranks, over real gloo."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import rank_harness as ranks
import torch

from limits import limit
from llmtrain.distributed.control_group import ControlGroup, as_peer_lost, peer_errors
from llmtrain.distributed.world import World
from llmtrain.errors import CheckpointError, ConfigError, DataError, Interrupted, PeerLost, TrainingFailed, UsageError

SIZE = 3


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """The results of each of three ranks; one launch for all calls that succeed."""

    def call(world: World) -> dict[str, Any]:
        control, rank = world.control, world.rank
        rows = torch.tensor([[rank, 10.0 * rank], [0.5, -rank]])
        made = []

        def make() -> dict[str, Any]:
            made.append(rank)
            return {"by": rank, "text": "é" * 1000}

        return {
            "any none": control.any(False),
            "any one": control.any(rank == 1),
            "any all": control.any(True),
            "sum": control.sum(10**12 + rank),
            "gather": control.gather({"rank": rank, "text": "x" * 1000 * rank}),
            "gather_tensors": control.gather_tensors(rows.t()).tolist(),  # not contiguous
            "gather_tensors int": control.gather_tensors(torch.tensor(rank)).tolist(),
            "on_rank0": control.on_rank0(make),
            "made": made,
            "all_or_none": control.all_or_none(lambda: rank * 2),
            "gather_results": control.gather_results(lambda: rank * 3),
            "saving": world.saving.sum(rank),
            "barrier": control.barrier(),
            "table": (world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank),
        }

    return ranks.values(ranks.run_ranks(SIZE, call))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("any none", False),
        ("any one", True),
        ("any all", True),
        ("sum", 3 * 10**12 + 3),
        ("gather", [{"rank": rank, "text": "x" * 1000 * rank} for rank in range(SIZE)]),
        ("gather_tensors", [[[rank, 0.5], [10.0 * rank, -rank]] for rank in range(SIZE)]),
        ("gather_tensors int", [0, 1, 2]),
        ("on_rank0", {"by": 0, "text": "é" * 1000}),
        ("gather_results", [0, 3, 6]),
        ("saving", 3),
    ],
)
def test_every_rank_gets_the_same(results: list[dict[str, Any]], name: str, expected: Any) -> None:
    assert [result[name] for result in results] == [expected] * SIZE


def test_all_or_none_returns_own_result(results: list[dict[str, Any]]) -> None:
    assert [result["all_or_none"] for result in results] == [0, 2, 4]


def test_on_rank0_runs_on_rank0_only(results: list[dict[str, Any]]) -> None:
    assert [result["made"] for result in results] == [[0], [], []]


def test_world_numbers(results: list[dict[str, Any]]) -> None:
    assert [result["table"] for result in results] == [(rank, SIZE, rank, SIZE, 0) for rank in range(SIZE)]


def test_single_process_needs_no_communication() -> None:
    alone = ControlGroup()
    assert (alone.any(True), alone.any(False), alone.sum(5), alone.gather("x")) == (True, False, 5, ["x"])
    assert alone.gather_tensors(torch.tensor([1, 2])).tolist() == [[1, 2]]
    assert alone.on_rank0(lambda: 3) == alone.all_or_none(lambda: 3) == 3
    assert alone.gather_results(lambda: 4) == [4]
    with pytest.raises(DataError, match="bad"):
        alone.all_or_none(lambda: _raise(DataError("bad")))


def _raise(problem: Exception) -> Any:
    raise problem


PROBLEMS: list[tuple[str, Callable[[], Exception], str, int]] = [
    ("UsageError", lambda: UsageError("bad.", known=["a", "b"], remedy="Do it."), "bad. Known: a, b.", 64),
    ("DataError", lambda: DataError("bad text.", remedy="Do it."), "bad text.", 65),
    ("CheckpointError", lambda: CheckpointError("torn.", remedy="Do it."), "torn.", 65),
    ("TrainingFailed", lambda: TrainingFailed("NaN.", remedy="Do it."), "NaN.", 65),
    ("Interrupted", lambda: Interrupted("results.", remedy="Do it."), "results.", 75),
    ("PeerLost", lambda: PeerLost("gone.", remedy="Do it."), "gone.", 75),
    ("UsageError", lambda: ConfigError("c.yaml", ["a: wrong", "b: wrong"]), "a: wrong\n  - b: wrong", 64),
]


@pytest.fixture(scope="module")
def failures() -> list[list[tuple[str, str, int]]]:
    """For each rank, how every kind of problem of rank 1 was raised there; the group stays usable after each."""

    def ask(world: World) -> list[tuple[str, str, int]]:
        found = []
        for _, make, _, _ in PROBLEMS:
            try:
                world.control.all_or_none(lambda make=make: _raise(make()) if world.rank == 1 else world.rank)
            except Exception as problem:
                found.append((type(problem).__name__, str(problem), getattr(problem, "exit_code", -1)))
            assert world.control.sum(1) == 2
        for method in (world.control.on_rank0, world.control.gather_results):
            try:
                method(lambda: _raise(DataError("of rank 0.")) if world.rank == 0 else 1)
            except Exception as problem:
                found.append((type(problem).__name__, str(problem), getattr(problem, "exit_code", -1)))
        try:
            world.control.all_or_none(lambda: _raise(OSError(28, "No space left")) if world.rank == 1 else 1)
        except OSError as problem:
            found.append((type(problem).__name__, str(problem), -1))
        return found

    return ranks.values(ranks.run_ranks(2, ask))


@pytest.mark.parametrize("number", range(len(PROBLEMS)), ids=[name for name, *_ in PROBLEMS])
def test_error_on_one_rank_is_raised_on_all(failures: list[list[tuple[str, str, int]]], number: int) -> None:
    name, make, text, code = PROBLEMS[number]
    on_rank0, on_rank1 = failures[0][number], failures[1][number]
    assert on_rank1 == (type(make()).__name__, str(make()), code)
    assert on_rank0[0] == name
    assert text in on_rank0[1]
    assert "rank 1" in on_rank0[1], "the error names the rank that failed"
    assert on_rank0[2] == code
    assert ("Do it." in on_rank0[1]) == ("Do it." in on_rank1[1]), "the remedy is included"


def test_error_on_rank0_is_raised_on_all(failures: list[list[tuple[str, str, int]]]) -> None:
    for rank in (0, 1):
        for kind, text, code in failures[rank][len(PROBLEMS) : len(PROBLEMS) + 2]:
            assert (kind, code) == ("DataError", 65)
            assert "of rank 0." in text


def test_error_of_another_rank_keeps_its_reason() -> None:
    """`llmtrain why` tells causes of one error type apart by it, whichever rank's report it reads."""

    def fail(world: World) -> str | None:
        problem = TrainingFailed("The disk is full.", reason="disk_full")
        with pytest.raises(TrainingFailed) as caught:
            world.control.on_rank0(lambda: _raise(problem))
        return caught.value.reason

    assert ranks.values(ranks.run_ranks(2, fail)) == ["disk_full", "disk_full"]


def test_oserror_on_one_rank_is_raised_on_all(failures: list[list[tuple[str, str, int]]]) -> None:
    for rank in (0, 1):
        kind, text, _ = failures[rank][-1]
        assert kind == "OSError"
        assert "No space left" in text


def test_killed_rank_is_peer_lost_on_others() -> None:
    """The others wait in a collective while rank 1 is killed."""

    def ask(world: World) -> str:
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with peer_errors():
            world.control.any(False)
        return "not detected"

    started = time.monotonic()
    ended = ranks.run_ranks(3, ask)
    assert ended[1].code == -signal.SIGKILL
    for end in (ended[0], ended[2]):
        assert end.error is not None, end.output
        kind, text, code = end.error
        assert (kind, code) == ("PeerLost", 75)
        assert "newest checkpoint" in text
    assert time.monotonic() - started < limit(15)


@pytest.mark.parametrize(
    ("problem", "is_lost"),
    [
        (RuntimeError("[../third_party/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]"), True),
        (torch.distributed.DistNetworkError("connection reset"), True),
        (torch.distributed.DistBackendError("NCCL error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OSError("Connection reset by peer"), False),
        (ValueError("gloo"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
    ],
)
def test_as_peer_lost(problem: Exception, is_lost: bool) -> None:
    assert (as_peer_lost(problem) is not None) == is_lost
    with pytest.raises(PeerLost if is_lost else type(problem)), peer_errors():
        raise problem
