"""Runs of a cluster in the page: a fake API server for their state, a local process for the reader pod."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("kubernetes")


from kube_runs import STEP, FakeRun, ended, launch
from starlette.testclient import TestClient

from demo_runs import make_run, write_rows
from kube_server import KubeServer
from limits import wait_until
from llmtrain.errors import UsageError
from llmtrain.operate.fetch import reader_pod as reader_pod_module
from llmtrain.operate.fetch.reader import reader_pod
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.page import actions, cluster_runs, mirror
from llmtrain.page.actions import possible_actions
from llmtrain.page.cluster_runs import ClusterRuns
from llmtrain.page.mirror import Mirror
from llmtrain.page.run_catalog import RunCatalog
from llmtrain.page.security import Access
from llmtrain.page.server import make_app
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.task_scores import newest_task_scores, write_task_scores
from local_pods_cluster import LocalPodsCluster, record_of_claim


@pytest.fixture
def run(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    monkeypatch.setattr(cluster_runs, "POLL_SEC", 0.05)
    monkeypatch.setattr(mirror, "ROUND_SEC", 0.05)
    monkeypatch.setattr(cluster_runs, "FIRST_SEC", 60.0)  # a limit for a loaded machine
    monkeypatch.setattr(reader_pod_module, "START_SEC", 0.1)  # nothing starts the reader pods of this API server
    return launch(kube)


@pytest.fixture
def runs(run: FakeRun) -> Iterator[ClusterRuns]:
    runs = ClusterRuns(run.cluster, "team")
    yield runs
    runs.close()


def until(condition: Callable[[], Any]) -> Any:
    return wait_until(condition, 120)


def client_of(tmp_path: Path, runs: ClusterRuns, **options: Any) -> TestClient:
    access = Access(port=8642, **options)
    client = TestClient(make_app(RunCatalog(str(tmp_path), runs), access), base_url="http://127.0.0.1:8642")
    client.get("/", params={"token": access.token})
    return client


def test_list_has_runs_of_namespace_and_directory(run: FakeRun, runs: ClusterRuns, tmp_path: Path) -> None:
    run.pod(0)
    run.pod(1)
    run.say(0, STEP.format(12))
    make_run(tmp_path, "local-one", steps=5)
    rows = {row["key"]: row for row in client_of(tmp_path, runs).get("/api/runs").json()["rows"]}
    assert set(rows) == {"local/local-one", "team/demo"}
    row = rows["team/demo"]
    assert (row["state"], row["step"], row["max_steps"], row["loss"]) == ("running", 12, 30, 5.1922)
    assert (row["pods"], row["time_left"], row["where"]) == (2, "0:00:09", "team")
    assert possible_actions(row) == ["stop", "recover", "delete"]


def test_pods_events_commands_and_log_of_run(run: FakeRun, runs: ClusterRuns, tmp_path: Path) -> None:
    names = [run.pod(0), run.pod(1)]
    run.say(1, "[TRAIN] hello <b>from</b> rank 1")
    run.event("BackOff", "Back-off restarting", kind="Pod", name=names[1])
    client = client_of(tmp_path, runs)
    query = {"key": "team/demo"}
    details = until(lambda: (d := client.get("/api/run", params=query).json()["details"])["pods"] and d)
    assert [(pod["index"], pod["phase"], pod["node"]) for pod in details["pods"]] == [
        (0, "Running", "k8s-node0"),
        (1, "Running", "k8s-node1"),
    ]
    assert [row["reason"] for row in details["events"]] == ["BackOff"]
    assert any(row["command"].startswith("llmtrain fetch demo") for row in details["commands"])
    log = until(lambda: (part := client.get("/api/log", params={**query, "rank": 1}).json()).get("text") and part)
    assert log["text"].endswith("[TRAIN] hello <b>from</b> rank 1\n")
    assert "llmtrain logs demo --rank 1" in log["note"]  # a search covers the last lines of a running pod
    run.say(1, "another line")
    until(lambda: "another line" in client.get("/api/log", params={**query, "rank": 1}).json()["text"])


def test_lost_node_is_listed_once_since_when(run: FakeRun, runs: ClusterRuns, tmp_path: Path) -> None:
    since = time.time() - 300
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since))
    lost = {"type": "Ready", "status": "False", "reason": "NodeNotReady", "lastTransitionTime": stamp}
    run.pod(0)
    run.pod(1, conditions=[lost, {"type": "ContainersReady", "status": "True"}])
    client = client_of(tmp_path, runs)
    query = {"key": "team/demo"}
    (event,) = until(lambda: client.get("/api/run", params=query).json()["details"]["events"])
    assert (event["about"], event["reason"], event["is_open"]) == ("k8s-node1", "NotReady", True)
    assert event["time"] == pytest.approx(since, abs=60)


def test_why_of_cluster_run_is_the_diagnosis(run: FakeRun, runs: ClusterRuns, tmp_path: Path) -> None:
    run.pod(0, ended(137, "OOMKilled"))
    run.pod(1)
    client = client_of(tmp_path, runs)
    client.get("/api/runs")
    why = client.get("/api/why", params={"key": "team/demo"}).json()["why"]
    assert why["cause"] == "oom_killed"
    assert why["evidence"]
    assert why["remedy"]


def test_cluster_that_goes_away_is_a_problem_and_local_runs_stay(
    run: FakeRun, runs: ClusterRuns, tmp_path: Path
) -> None:
    run.pod(0)
    make_run(tmp_path, "local-one", steps=5)
    client = client_of(tmp_path, runs)
    assert len(client.get("/api/runs").json()["rows"]) == 2
    run.kube.is_away = True
    value = until(lambda: (v := client.get("/api/runs").json())["problems"] and v)
    assert [row["where"] for row in value["problems"]] == ["cluster"]
    assert len(value["rows"]) == 2  # as they were last
    run.kube.is_away = False
    until(lambda: not client.get("/api/runs").json()["problems"])


def test_user_who_may_not_list_pods_sees_why(run: FakeRun, runs: ClusterRuns, tmp_path: Path) -> None:
    run.kube.forbidden.add("pods")
    make_run(tmp_path, "local-one", steps=5)
    value = client_of(tmp_path, runs).get("/api/runs").json()
    assert [row["where"] for row in value["problems"]] == ["cluster"]
    assert "pods" in value["problems"][0]["what"]
    assert [row["key"] for row in value["rows"]] == ["local/local-one"]


def test_unknown_run_and_other_namespace_are_refused(run: FakeRun, runs: ClusterRuns, tmp_path: Path) -> None:
    client = client_of(tmp_path, runs)
    client.get("/api/runs")
    for key in ("team/other", "lab/demo", "team/../demo"):
        assert client.get("/api/curves", params={"key": key}).status_code in (400, 404), key
    assert run.record.run_id == "demo"


def test_reader_pod_that_cannot_be_created_is_reported(run: FakeRun, runs: ClusterRuns, tmp_path: Path) -> None:
    run.pod(0)
    run.kube.gate = lambda method, path, _: (403, "{}") if method == "POST" and "/pods" in path else None
    client = client_of(tmp_path, runs)
    client.get("/api/runs")
    assert client.get("/api/curves", params={"key": "team/demo", "metric": "train/loss:50"}).status_code == 200
    until(lambda: client.get("/api/run", params={"key": "team/demo"}).json()["row"].get("problem"))


# The copy of the files, through a reader pod that is a local process.


def test_mirror_copies_small_files_and_appends_metrics(tmp_path: Path) -> None:
    remote = make_run(tmp_path / "volume", "demo", steps=50, world_size=2)
    (remote / "checkpoints" / "step_50" / "model.safetensors").write_bytes(b"x" * 1000)
    write_task_scores(RunDirectory(remote), 50, {"grammar": {"metrics": {"acc": 0.5}}})
    cluster: Any = LocalPodsCluster(tmp_path / "volume")
    copy = Mirror(cluster, record_of_claim("demo"), tmp_path / "copy")
    with reader_pod(ObservedRun(cluster, record_of_claim("demo"))) as reader:
        copy.read_once(reader)
        assert (copy.run.metrics).read_bytes() == (remote / "metrics.jsonl").read_bytes()
        assert newest_task_scores(copy.run) == {"grammar/acc": 0.5}
        assert (copy.run.heartbeats / "rank-1.json").exists()
        assert (copy.run.checkpoints / "step_50" / "manifest.json").exists()
        assert not (copy.run.checkpoints / "step_50" / "model.safetensors").exists()
        assert not copy.run.logs.exists()
        write_rows(remote, 51, 52, 0.0, 0.5, 6e-4, 1000)
        (remote / "heartbeats" / "rank-1.json").unlink()
        cluster.commands.clear()
        copy.read_once(reader)
    sent = next(words for words in cluster.commands if words[0] == "send")
    assert len(sent) == 5  # only the metrics, and only their end
    assert int(sent[2]) > 0
    assert (copy.run.metrics).read_bytes() == (remote / "metrics.jsonl").read_bytes()
    assert not (copy.run.heartbeats / "rank-1.json").exists()


def test_mirror_reads_replaced_metrics_from_beginning(tmp_path: Path) -> None:
    remote = make_run(tmp_path / "volume", "demo", steps=50, extras=False)
    cluster: Any = LocalPodsCluster(tmp_path / "volume")
    copy = Mirror(cluster, record_of_claim("demo"), tmp_path / "copy")
    with reader_pod(ObservedRun(cluster, record_of_claim("demo"))) as reader:
        copy.read_once(reader)
        text = (remote / "metrics.jsonl").read_text()
        replaced = remote / "new"
        replaced.write_text(text.replace("train/epoch", "train/ep"))
        replaced.replace(remote / "metrics.jsonl")
        write_rows(remote, 60, 90, 0.0, 0.5, 6e-4, 1000)
        copy.read_once(reader)
    assert copy.run.metrics.read_bytes() == (remote / "metrics.jsonl").read_bytes()


def test_mirror_deletes_reader_pod_when_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "ROUND_SEC", 0.05)
    make_run(tmp_path / "volume", "demo", steps=5, extras=False)
    cluster: Any = LocalPodsCluster(tmp_path / "volume")
    copy = Mirror(cluster, record_of_claim("demo"), tmp_path / "copy")
    run = copy.want(wait_sec=20)
    assert run.metrics.exists()
    assert len(cluster.pods) == 1
    copy.close()
    assert cluster.pods == {}


def test_log_of_unknown_rank_is_refused(run: FakeRun, runs: ClusterRuns) -> None:
    run.pod(0)
    runs.refresh()
    with pytest.raises(UsageError):
        runs.log_path("team/demo", 99)


def test_list_does_not_start_reader_pods(run: FakeRun, runs: ClusterRuns, tmp_path: Path) -> None:
    run.pod(0)
    client = client_of(tmp_path, runs)
    client.get("/api/runs")
    assert client.get("/api/sparks", params={"key": "team/demo"}).json() == {"team/demo": {"x": [], "y": []}}
    assert not [words for words in run.kube.requests if words.startswith("POST")]


@pytest.mark.parametrize("action", ["stop", "recover", "delete"])
def test_action_on_cluster_run_is_the_command(
    run: FakeRun, runs: ClusterRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(actions, "_run", lambda words: commands.append(words) or "done")
    run.pod(0)
    catalog = RunCatalog(str(tmp_path), runs)
    catalog.list_since("")
    assert actions.act(catalog, "team/demo", action, "demo") == "done"
    assert commands[0][:2] == [action, "demo"]
    with pytest.raises(UsageError):
        actions.act(catalog, "team/demo", action, "demo-2")
    with pytest.raises(UsageError):
        actions.act(catalog, "team/demo", "resume", "demo")  # it has not ended
    assert len(commands) == 1


def test_unexpected_answer_of_cluster_is_a_problem(
    runs: ClusterRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_status(*_: object) -> list[object]:
        raise KeyError("metadata")

    monkeypatch.setattr(cluster_runs, "all_status", all_status)
    make_run(tmp_path, "local-one", steps=5)
    value = client_of(tmp_path, runs).get("/api/runs").json()
    assert [row["key"] for row in value["rows"]] == ["local/local-one"]
    assert [row["where"] for row in value["problems"]] == ["cluster"]


def test_namespace_with_the_name_of_local_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kube: KubeServer
) -> None:
    """A run of that namespace is not the run of the same name in the directory, which an action may delete."""
    run = launch(kube)
    runs = ClusterRuns(run.cluster, "local")
    statuses = [replace(status, namespace="local") for status in cluster_runs.all_status(run.cluster, "team")]
    monkeypatch.setattr(cluster_runs, "all_status", lambda *_: statuses)
    make_run(tmp_path, "demo", steps=5)
    catalog = RunCatalog(str(tmp_path), runs)
    try:
        rows = {row["key"]: row for row in catalog.list_since("")["rows"]}
        assert set(rows) == {"local/demo", "local./demo"}
        assert possible_actions(rows["local/demo"]) == ["delete"]
        assert catalog.row("local./demo")["pods"] == 2
        assert "local" in catalog.cluster_options("local.")
    finally:
        runs.close()


def test_full_disk_of_copies_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class FullReader:
        def __init__(self, *_: object) -> None: ...

        def start(self) -> None:
            raise OSError(28, "No space left on device")

        def stop(self) -> None: ...

    monkeypatch.setattr(mirror, "Reader", FullReader)
    monkeypatch.setattr(mirror, "RETRY_SEC", 0.0)
    cluster: Any = LocalPodsCluster(tmp_path)
    copy = Mirror(cluster, record_of_claim("demo"), tmp_path)
    copy.want(20)
    assert copy.problem
    assert "No space left" in copy.problem["what"]
    copy.close()
