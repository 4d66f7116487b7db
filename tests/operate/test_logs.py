"""Merged logs: ordered by time, across restarts and replaced pods, from the volume when the pods are gone."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from kube_runs import STEP, FakeRun, ended, launch, running

from kube_server import KubeServer
from llmtrain.errors import UsageError
from llmtrain.operate.fetch.reader import FileRequest, FileResponse
from llmtrain.operate.logs import merged_logs as logs
from llmtrain.operate.logs.merged_logs import line_as_dict, merged_logs, node_rank_of
from llmtrain.operate.logs.pod_log import LogLine, split_time
from llmtrain.operate.observed_run import ObservedRun

pytestmark = pytest.mark.usefixtures("hurry")


def both(kube: KubeServer, kind: str = "indexed_job", *sets: str) -> FakeRun:
    run = launch(kube, kind, *sets)
    run.pod(0)
    run.pod(1)
    return run


def lines(run: FakeRun, **options: object) -> list[str]:
    return [shown(line) for line in merged_logs(ObservedRun(run.cluster, run.record), **options)]


def shown(line: LogLine) -> str:
    return f"[{line.index}] {line.text}"


def test_merged_by_time(kube: KubeServer) -> None:
    run = both(kube)
    run.say(0, "a", "")
    run.say(1, "b")
    run.say(0, "c with 2026-01-01T00:00:00Z in it")
    assert lines(run) == ["[0] a", "[0] ", "[1] b", "[0] c with 2026-01-01T00:00:00Z in it"]


def test_rank_selects_its_pod(kube: KubeServer) -> None:
    run = both(kube, "indexed_job", "launch.processes_per_node=2")
    run.say(0, "a")
    run.say(1, "b")
    assert lines(run, rank=1) == ["[0] a"]
    assert lines(run, rank=2) == lines(run, rank=3) == ["[1] b"]
    with pytest.raises(UsageError, match="0 to 3"):
        node_rank_of(run.record, 4)


def test_tail_applies_to_each_pod(kube: KubeServer) -> None:
    run = both(kube)
    run.say(0, *"abcd")
    run.say(1, *"efgh")
    assert lines(run, tail=2) == ["[0] c", "[0] d", "[1] g", "[1] h"]
    assert lines(run, tail=0) == []


def test_earlier_containers_and_pods_come_first(kube: KubeServer) -> None:
    run = both(kube, "stateful_set")
    run.say(1, "other")
    run.say(0, "first")
    kube.restart_log(run.pods[0])
    run.set(0, running(), restarts=1, last=ended(1))
    run.say(0, "second")
    assert lines(run) == ["[1] other", "[0] first", "[0] second"]
    assert lines(run, previous=False) == ["[1] other", "[0] second"]
    assert lines(run, rank=0, tail=2) == ["[0] first", "[0] second"]

    jobs = launch(kube, name="jobs")
    jobs.pod(0)
    jobs.say(0, "failed pod")
    jobs.end(0, 1)
    jobs.pod(0)
    jobs.say(0, "replacement")
    assert lines(jobs) == ["[0] failed pod", "[0] replacement"]
    assert lines(jobs, previous=False) == ["[0] replacement"]


def test_log_of_failed_init_container(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0, {"waiting": {"reason": "PodInitializing"}})
    row = {"name": "prefetch", "state": ended(65), "restartCount": 0}
    kube.change("Pod", run.pods[0], {"status": {"initContainerStatuses": [row], "phase": "Failed"}})
    kube.say(run.pods[0], "error: the hub has no such model", container="prefetch")
    assert lines(run) == ["[0] error: the hub has no such model"]


def test_follow_until_the_end_includes_new_pods(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    run.say(0, "a")
    found: list[str] = []
    stream = map(shown, merged_logs(ObservedRun(run.cluster, run.record), follow=True))
    found.append(next(stream))
    run.pod(1)
    run.say(1, "b")
    found.append(next(stream))
    run.say(0, "c")
    run.end(0, 1)
    found.append(next(stream))
    run.pod(0)
    run.say(0, "d")
    found.append(next(stream))
    run.say(1, "e")
    run.end(0)
    run.end(1)
    run.finish()
    assert [*found, *stream] == ["[0] a", "[1] b", "[0] c", "[0] d", "[1] e"]


def test_follow_stateful_set_until_its_pods_are_idle(kube: KubeServer) -> None:
    run = both(kube, "stateful_set")
    for index in (0, 1):
        run.say(index, STEP.format(1), "[DDP] ended with exit code 0; it waits to be removed")
    assert len(lines(run, follow=True)) == 4
    assert len(lines(run, follow=True, rank=1, tail=1)) == 1


def test_follow_across_an_api_server_outage(kube: KubeServer) -> None:
    run = both(kube)
    run.say(0, "a", "b")
    stream = map(shown, merged_logs(ObservedRun(run.cluster, run.record), follow=True))
    assert [next(stream), next(stream)] == ["[0] a", "[0] b"]
    kube.is_away = True
    run.say(0, "c")
    threading.Timer(0.5, lambda: setattr(kube, "is_away", False)).start()
    assert next(stream) == "[0] c"
    run.say(0, "d")
    run.end(0)
    run.end(1)
    run.finish()
    assert list(stream) == ["[0] d"]


@pytest.fixture
def volume(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Files of the run directory, read through a fake Reader."""
    files: dict[str, bytes] = {}

    class Reader:
        def files(self, prefix: str = "") -> list[SimpleNamespace]:
            return [
                SimpleNamespace(path=path, size=len(data)) for path, data in files.items() if path.startswith(prefix)
            ]

        def read_many(self, requests: list[FileRequest]) -> Iterator[tuple[FileResponse, Iterator[bytes]]]:
            nonlocal processes
            processes += 1
            assert processes == 1, "each is a process in a small pod"
            for request in requests:
                data = files[request.path]
                yield FileResponse(request.path), (data[start : start + 7] for start in range(0, len(data), 7))
            processes -= 1

    @contextmanager
    def reader_pod(run: object) -> Iterator[Reader]:  # noqa: ARG001
        yield Reader()

    processes = 0
    monkeypatch.setattr(logs, "reader_pod", reader_pod)
    return files


def test_logs_are_read_from_the_volume_when_pods_are_gone(kube: KubeServer, volume: dict[str, bytes]) -> None:
    run = launch(kube, "indexed_job", "launch.processes_per_node=2")
    volume["logs/train.log"] = b"2026-01-01 00:00:01 [TRAIN] one\n  more of it\n2026-01-01 00:00:03 three \xff\n"
    volume["logs/rank-2.log"] = b"2026-01-01 00:00:02 [DDP] two"
    volume["metrics.jsonl"] = b"{}"
    expected = [
        "[0] 2026-01-01 00:00:01 [TRAIN] one",
        "[0]   more of it",
        "[1] 2026-01-01 00:00:02 [DDP] two",
        "[0] 2026-01-01 00:00:03 three \N{REPLACEMENT CHARACTER}",
    ]
    assert lines(run) == expected
    assert lines(run, tail=1) == expected[2:]
    assert lines(run, rank=2) == [expected[2]]
    with pytest.raises(UsageError, match="rank 3"):
        lines(run, rank=3)
    kube.remove("Job", "demo")
    assert lines(run, follow=True) == expected


def test_many_ranks_use_one_process_in_the_reader_pod(kube: KubeServer, volume: dict[str, bytes]) -> None:
    ranks = 200
    run = launch(kube)
    for rank in range(ranks):
        rows = [f"2026-01-01 00:{second:02}:{rank % 60:02} rank {rank} line {second}\n" for second in range(3)]
        volume[f"logs/rank-{rank}.log"] = "".join(rows).encode()
    merged = lines(run)
    assert len(merged) == 3 * ranks
    times = [line.split()[2] for line in merged]
    assert times == sorted(times)
    assert len(lines(run, tail=1)) == ranks


def test_json_lines_from_the_volume(kube: KubeServer, volume: dict[str, bytes]) -> None:
    run = launch(kube)
    volume["logs/train.log"] = b'{"time": 1.5, "message": "a"}\n{"time": 10.25, "message": "c"}\n'
    volume["logs/rank-1.log"] = b'{"time": 9.0, "message": "b"}\n{broken'
    assert [line[-3:] for line in lines(run)] == ['a"}', 'b"}', "ken", 'c"}']


class TestAsDict:
    def test_training_line_of_a_pod(self, kube: KubeServer) -> None:
        run = both(kube)
        run.say(1, STEP.format(7))
        (value,) = [line_as_dict(line, 1) for line in merged_logs(ObservedRun(run.cluster, run.record))]
        assert (value["pod"], value["node_rank"], value["rank"]) == (run.pods[1], 1, 1)
        assert (value["tag"], value["text"]) == ("TRAIN", STEP.format(7))
        assert {"step": 7, "max_steps": 30, "loss": 5.1922}.items() <= value["data"].items()
        assert value["time"].endswith("Z")

    def test_followed_lines_have_their_pod(self, kube: KubeServer) -> None:
        run = both(kube)
        run.say(0, "a")
        stream = merged_logs(ObservedRun(run.cluster, run.record), follow=True)
        assert line_as_dict(next(stream), 1)["pod"] == run.pods[0]
        run.end(0)
        run.end(1)
        run.finish()
        assert list(stream) == []

    @pytest.mark.parametrize(
        ("text", "rank"),
        [
            ('{"tag": "TRAIN", "message": "x", "rank": 3, "loss": NaN}', 3),
            ("[DDP] [rank 2] ready", 2),
            ("[DDP] ready", None),
            ("{broken", None),
            ("[1, 2]", None),
            ("", None),
        ],
    )
    def test_several_processes_per_pod(self, text: str, rank: int | None) -> None:
        value = line_as_dict(LogLine(1, "", text, "demo-1"), 2)
        assert (value["rank"], value["text"], value["time"]) == (rank, text, None)
        json.loads(json.dumps(value), parse_constant=pytest.fail)

    def test_json_line_keeps_its_fields(self) -> None:
        value = line_as_dict(LogLine(0, "", '{"tag": "EVAL", "val": {"loss": 1.5}, "nan": NaN}', "demo-0"), 1)
        assert value["tag"] == "EVAL"
        assert value["data"] == {"tag": "EVAL", "val": {"loss": 1.5}, "nan": None}

    def test_nan_loss_is_omitted(self) -> None:
        value = line_as_dict(LogLine(0, "", STEP.format(1).replace("5.1922", "nan"), "demo-0"), 1)
        assert "loss" not in value["data"]
        assert value["data"]["step"] == 1

    def test_from_the_volume(self, kube: KubeServer, volume: dict[str, bytes]) -> None:
        run = launch(kube, "indexed_job", "launch.processes_per_node=2")
        volume["logs/train.log"] = b'{"time": 1.5, "tag": "TRAIN", "message": "a"}\n'
        volume["logs/rank-3.log"] = b"2026-01-01 00:00:02 [DDP] two\n"
        first, second = (line_as_dict(line, 2) for line in merged_logs(ObservedRun(run.cluster, run.record)))
        assert (first["pod"], first["node_rank"], first["rank"], first["time"]) == (
            None,
            0,
            0,
            "1970-01-01T00:00:01.500000+00:00",
        )
        assert (second["node_rank"], second["rank"], second["time"]) == (1, 3, "2026-01-01 00:00:02")
        assert (second["tag"], second["text"]) == ("DDP", "[DDP] two")


def test_split_time_pads_fractions_so_that_times_sort() -> None:
    early, text = split_time("2026-01-01T00:00:00.1Z a b")
    late, _ = split_time("2026-01-01T00:00:00.10000001Z x")
    assert text == "a b"
    assert early < late
    assert split_time("2026-01-01T00:00:00Z ") == ("2026-01-01T00:00:00.000000000Z", "")
    assert split_time("no time here") == ("", "no time here")
