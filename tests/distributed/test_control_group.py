"""Small messages between ranks, over real gloo."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import rank_harness as ranks
import torch

from llmtrain.distributed.control_group import ControlGroup, as_peer_lost, peer_errors
from llmtrain.distributed.world import World
from llmtrain.errors import CheckpointError, ConfigError, DataError, Interrupted, PeerLost, TrainingFailed, UsageError

SIZE = 3


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """What each of three ranks heard; one launch for all questions that end well."""

    def ask(world: World) -> dict[str, Any]:
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
            "gather_rows": control.gather_rows(rows.t()).tolist(),  # not contiguous
            "gather_rows int": control.gather_rows(torch.tensor(rank)).tolist(),
            "on_rank0": control.on_rank0(make),
            "made": made,
            "together": control.all_or_none(lambda: rank * 2),
            "gather_results": control.gather_results(lambda: rank * 3),
            "saving": world.saving.sum(rank),
            "barrier": control.barrier(),
            "table": (world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank),
        }

    return ranks.values(ranks.run_ranks(SIZE, ask))


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("any none", False),
        ("any one", True),
        ("any all", True),
        ("sum", 3 * 10**12 + 3),
        ("gather", [{"rank": rank, "text": "x" * 1000 * rank} for rank in range(SIZE)]),
        ("gather_rows", [[[rank, 0.5], [10.0 * rank, -rank]] for rank in range(SIZE)]),
        ("gather_rows int", [0, 1, 2]),
        ("on_rank0", {"by": 0, "text": "é" * 1000}),
        ("gather_results", [0, 3, 6]),
        ("saving", 3),
    ],
)
def test_every_rank_hears_the_same(told: list[dict[str, Any]], question: str, answer: Any) -> None:
    assert [heard[question] for heard in told] == [answer] * SIZE


def test_together_gives_everyone_its_own(told: list[dict[str, Any]]) -> None:
    assert [heard["together"] for heard in told] == [0, 2, 4]


def test_only_the_first_makes_what_is_from_the_first(told: list[dict[str, Any]]) -> None:
    assert [heard["made"] for heard in told] == [[0], [], []]


def test_the_world_knows_its_numbers(told: list[dict[str, Any]]) -> None:
    assert [heard["table"] for heard in told] == [(rank, SIZE, rank, SIZE, 0) for rank in range(SIZE)]


def test_alone_everything_is_answered_at_once() -> None:
    alone = ControlGroup()
    assert (alone.any(True), alone.any(False), alone.sum(5), alone.gather("x")) == (True, False, 5, ["x"])
    assert alone.gather_rows(torch.tensor([1, 2])).tolist() == [[1, 2]]
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
    ("Interrupted", lambda: Interrupted("told.", remedy="Do it."), "told.", 75),
    ("PeerLost", lambda: PeerLost("gone.", remedy="Do it."), "gone.", 75),
    ("UsageError", lambda: ConfigError("c.yaml", ["a: wrong", "b: wrong"]), "a: wrong\n  - b: wrong", 64),
]


@pytest.fixture(scope="module")
def failures() -> list[list[tuple[str, str, int]]]:
    """For each rank, how every kind of problem of rank 1 was raised there; the control is used on after each."""

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
def test_an_error_of_one_rank_is_one_of_all(failures: list[list[tuple[str, str, int]]], number: int) -> None:
    name, make, text, code = PROBLEMS[number]
    at_the_other, at_its_own = failures[0][number], failures[1][number]
    assert at_its_own == (type(make()).__name__, str(make()), code)
    assert at_the_other[0] == name
    assert text in at_the_other[1]
    assert "rank 1" in at_the_other[1], "it says whose error it is"
    assert at_the_other[2] == code
    assert ("Do it." in at_the_other[1]) == ("Do it." in at_its_own[1]), "the remedy travels along"


def test_what_fails_on_the_first_fails_everywhere(failures: list[list[tuple[str, str, int]]]) -> None:
    for rank in (0, 1):
        for kind, text, code in failures[rank][len(PROBLEMS) : len(PROBLEMS) + 2]:
            assert (kind, code) == ("DataError", 65)
            assert "of rank 0." in text


def test_a_full_disk_of_one_rank_is_an_oserror_of_all(failures: list[list[tuple[str, str, int]]]) -> None:
    for rank in (0, 1):
        kind, text, _ = failures[rank][-1]
        assert kind == "OSError"
        assert "No space left" in text


def test_a_lost_peer_is_told_as_such() -> None:
    """The others wait in a collective while rank 1 dies."""

    def ask(world: World) -> str:
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with peer_errors():
            world.control.any(False)
        return "nothing was noticed"

    started = time.monotonic()
    ended = ranks.run_ranks(3, ask)
    assert ended[1].code == -signal.SIGKILL
    for end in (ended[0], ended[2]):
        assert end.error is not None, end.output
        kind, text, code = end.error
        assert (kind, code) == ("PeerLost", 75)
        assert "Another process of the run is gone" in text
        assert "goes on from the newest checkpoint" in text
    assert time.monotonic() - started < 15


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
def test_which_errors_mean_a_lost_peer(problem: Exception, is_lost: bool) -> None:
    assert (as_peer_lost(problem) is not None) == is_lost
    with pytest.raises(PeerLost if is_lost else type(problem)), peer_errors():
        raise problem
