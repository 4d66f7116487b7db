"""Parsing of logs, scheduler messages and heartbeats for llmtrain why."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kube_runs import STEP
from why_runs import NO_GPU, WATCHDOG

from llmtrain.errors import LlmtrainError
from llmtrain.operate.fetch.reader import FileRequest, FileResponse, RemoteFile
from llmtrain.operate.status.scheduler import parse_unschedulable
from llmtrain.operate.why.log_patterns import error_in, report_from_text, traceback_end
from llmtrain.operate.why.snapshot import Stall
from llmtrain.operate.why.stall import compare_heartbeats, read_heartbeats


def test_error_in_reads_watchdog_lines_of_json_and_other_ranks() -> None:
    message = WATCHDOG.removeprefix("[DDP] ")
    for line in (
        json.dumps({"tag": "DDP", "message": message}),
        f"[DDP] [rank 2] {message}",
        f"stopped: rank 0: {message}",
    ):
        report = error_in([STEP.format(1), line])
        assert report is not None
        assert (report.silent_ranks, report.reason) == ((1,), "no_progress")
    assert traceback_end(
        ["[rank0]: Traceback (most recent call last):", "[rank0]:   File", "[rank0]: KeyError: 'x'"]
    ) == ("KeyError: 'x'")


def test_parse_unschedulable_reads_nodes_resources_and_fields() -> None:
    parsed = parse_unschedulable(NO_GPU)
    assert parsed.nodes == 3
    assert parsed.insufficient == {"nvidia.com/gpu": 2}
    assert parsed.fields == ["launch.tolerations"]
    both = parse_unschedulable(
        "0/2 nodes are available: 1 Insufficient memory, 2 Insufficient cpu. preemption: 0/2 nodes ..."
    )
    assert both.insufficient == {"memory": 1, "cpu": 2}
    assert parse_unschedulable(
        "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
    ).fields == ["launch.node_selector and launch.affinity"]
    assert parse_unschedulable("no nodes available to schedule pods").reasons == ()


def test_compare_heartbeats_finds_silent_and_advancing_ranks() -> None:
    before = {0: {"beat": 5, "progress": 3, "step": 7}, 1: {"beat": 5, "progress": 3, "step": 7}}
    after = {0: {"beat": 8, "progress": 3, "step": 7}, 1: {"beat": 5, "progress": 3, "step": 7}}
    assert compare_heartbeats(9, 3, before, after) == Stall(9, [1, 2], [], {0: 7, 1: 7})
    after[0]["progress"] = 4
    assert compare_heartbeats(9, 2, before, after).advancing_ranks == [0]
    assert compare_heartbeats(9, 2, {}, {}).silent_ranks is None


def test_read_heartbeats_of_the_newest_generation() -> None:
    files = {
        "heartbeats/generation.json": b'{"generation": 2}',
        "heartbeats/rank-0.json": b'{"rank": 0, "generation": 2, "beat": 4}',
        "heartbeats/rank-1.json": b'{"rank": 1, "generation": 1, "beat": 9}',
        "heartbeats/rank-2.json": b'{"rank": 2, "gener',
    }

    class Files:
        def files(self, prefix: str) -> list[RemoteFile]:
            return [RemoteFile(path, 1, 1, "1") for path in files if path.startswith(prefix)]

        def read_many(self, requests: list[FileRequest]) -> list[tuple[FileResponse, list[bytes]]]:
            return [(FileResponse(each.path), [files[each.path]]) for each in requests]

    reader: Any = Files()
    assert read_heartbeats(reader) == {0: {"rank": 0, "generation": 2, "beat": 4}}


# The patterns match what the other modules write.


def test_error_in_reads_the_watchdogs_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmtrain.training import watchdog

    errors: list[LlmtrainError] = []
    monkeypatch.setattr(watchdog, "exit_now", errors.append)
    world: Any = SimpleNamespace(rank=0, world_size=2)
    watchdog.Watchdog(tmp_path, world, 1, 5.0)._give_up(5.0)
    report = error_in([f"[DDP] {errors[0].what} {errors[0].remedy}"])
    assert report is not None
    assert (report.message, report.remedy, report.silent_ranks) == (errors[0].what, errors[0].remedy, (1,))


def test_error_in_reads_the_join_error() -> None:
    from llmtrain.distributed.rendezvous import _Failure, _join_error

    error = _join_error("demo-0.demo", 29500, _Failure("name", "the name demo-0.demo does not resolve: x"), 600.0)
    report = error_in(f"error: {error}".splitlines())
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
def test_report_from_text_reads_messages_of_the_first_version(line: str, expected: str) -> None:
    """Its images write no report; these are its messages, which have changed since."""
    report = report_from_text(line)
    assert expected in (report.reason, report.error)
