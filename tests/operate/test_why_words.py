"""llmtrain why: the sentences it takes apart are those that processes and the cluster write."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kube_runs import STEP
from why_runs import (
    NO_GPU,
    WATCHDOG,
)

from llmtrain.errors import LlmtrainError
from llmtrain.operate.fetch.reader import FileRequest, FileResponse, RemoteFile
from llmtrain.operate.status.scheduler import parse_unschedulable
from llmtrain.operate.why.log_patterns import error_in, report_from_text, traceback_end
from llmtrain.operate.why.snapshot import Stall
from llmtrain.operate.why.stall import compare, read_beats


def test_watchdog_lines_in_json_and_of_other_ranks() -> None:
    message = WATCHDOG.removeprefix("[DDP] ")
    for line in (
        json.dumps({"tag": "DDP", "message": message}),
        f"[DDP] [rank 2] {message}",
        f"stopped: rank 0: {message}",
    ):
        said = error_in([STEP.format(1), line])
        assert said is not None
        assert (said.silent_ranks, said.reason) == ((1,), "no_progress")
    assert traceback_end(
        ["[rank0]: Traceback (most recent call last):", "[rank0]:   File", "[rank0]: KeyError: 'x'"]
    ) == ("KeyError: 'x'")


def test_the_schedulers_sentence() -> None:
    room = parse_unschedulable(NO_GPU)
    assert room.nodes == 3
    assert room.insufficient == {"nvidia.com/gpu": 2}
    assert room.fields == ["launch.tolerations"]
    both = parse_unschedulable(
        "0/2 nodes are available: 1 Insufficient memory, 2 Insufficient cpu. preemption: 0/2 nodes ..."
    )
    assert both.insufficient == {"memory": 1, "cpu": 2}
    assert parse_unschedulable(
        "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
    ).fields == ["launch.node_selector and launch.affinity"]
    assert parse_unschedulable("no nodes available to schedule pods").reasons == ()


def test_hearts() -> None:
    before = {0: {"beat": 5, "progress": 3, "step": 7}, 1: {"beat": 5, "progress": 3, "step": 7}}
    after = {0: {"beat": 8, "progress": 3, "step": 7}, 1: {"beat": 5, "progress": 3, "step": 7}}
    assert compare(9, 3, before, after) == Stall(9, [1, 2], [], {0: 7, 1: 7})
    after[0]["progress"] = 4
    assert compare(9, 2, before, after).moving == [0]
    assert compare(9, 2, {}, {}).dead is None


def test_beats_of_the_newest_generation() -> None:
    files = {
        "heartbeats/generation.json": b'{"generation": 2}',
        "heartbeats/rank-0.json": b'{"rank": 0, "generation": 2, "beat": 4}',
        "heartbeats/rank-1.json": b'{"rank": 1, "generation": 1, "beat": 9}',
        "heartbeats/rank-2.json": b'{"rank": 2, "gener',
    }

    class Files:
        def files(self, prefix: str) -> list[RemoteFile]:
            return [RemoteFile(path, 1, 1, "1") for path in files if path.startswith(prefix)]

        def read_many(self, wanted: list[FileRequest]) -> list[tuple[FileResponse, list[bytes]]]:
            return [(FileResponse(want.path), [files[want.path]]) for want in wanted]

    reader: Any = Files()
    assert read_beats(reader) == {0: {"rank": 0, "generation": 2, "beat": 4}}


# What is read here is what is written there.


def test_the_watchdogs_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmtrain.training import watchdog

    told: list[LlmtrainError] = []
    monkeypatch.setattr(watchdog, "exit_now", told.append)
    world: Any = SimpleNamespace(rank=0, world_size=2)
    watchdog.Watchdog(tmp_path, world, 1, 5.0)._give_up(5.0)
    said = error_in([f"[DDP] {told[0].what} {told[0].remedy}"])
    assert said is not None
    assert (said.message, said.remedy, said.silent_ranks) == (told[0].what, told[0].remedy, (1,))


def test_the_masters_absence_in_words() -> None:
    from llmtrain.distributed.rendezvous import _Failure, _join_error

    error = _join_error("demo-0.demo", 29500, _Failure("name", "the name demo-0.demo does not resolve: x"), 600.0)
    said = error_in(f"error: {error}".splitlines())
    assert said is not None
    assert (said.message, said.remedy, said.reason) == (error.what, error.remedy, error.reason)


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
def test_messages_of_the_first_version(line: str, expected: str) -> None:
    """Its images write no report; these are its words, whatever ours are by now."""
    report = report_from_text(line)
    assert expected in (report.reason, report.error)
