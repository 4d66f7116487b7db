"""Parsing of tracebacks, scheduler messages and heartbeats for llmtrain why."""

from typing import Any

from why_runs import NO_GPU

from llmtrain.operate.fetch.reader import FileRequest, FileResponse, RemoteFile
from llmtrain.operate.status.scheduler import parse_unschedulable
from llmtrain.operate.why.diagnosis import traceback_end
from llmtrain.operate.why.snapshot import Stall
from llmtrain.operate.why.stall import compare_heartbeats, read_heartbeats


def test_traceback_end_reads_lines_with_torchruns_prefix() -> None:
    lines = ["[rank0]: Traceback (most recent call last):", "[rank0]:   File", "[rank0]: KeyError: 'x'"]
    assert traceback_end(lines) == "KeyError: 'x'"


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
