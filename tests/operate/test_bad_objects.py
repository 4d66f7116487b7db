"""Malformed objects in a namespace are reported and do not hide other runs."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from kube_runs import INDEX_LABELS, FakeRun, launch
from typer.testing import CliRunner, Result

from kube_server import KubeServer
from llmtrain.commands import delete, logs, status, stop, why
from llmtrain.errors import ClusterError, UsageError
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch import lifecycle as apply
from llmtrain.launch.job import JOB_FILE, config_map_name
from llmtrain.launch.pod_task import CONFIG_FILE
from llmtrain.launch.record import Record, find_record, list_records
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.all_runs import all_status
from llmtrain.operate.why.explain import explain

pytestmark = pytest.mark.usefixtures("hurry")
LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))


def change_file(run: FakeRun, file: str, text: str) -> None:
    run.kube.change("ConfigMap", config_map_name(run.plan.run_id), {"data": {file: text}})


def change_config(old: str, new: str) -> Callable[[FakeRun], None]:
    def change(run: FakeRun) -> None:
        assert old in run.plan.config_text
        change_file(run, CONFIG_FILE, run.plan.config_text.replace(old, new))

    return change


def config(text: str) -> Callable[[FakeRun], None]:
    return lambda run: change_file(run, CONFIG_FILE, text)


def job(value: Any) -> Callable[[FakeRun], None]:
    return lambda run: change_file(run, JOB_FILE, value if isinstance(value, str) else json.dumps(value))


WORK = {"mode": "train", "command": [], "launcher": "llmtrain"}
BAD_RECORDS = {
    "aliases": config(f"trainer:\n  lr: 1\n{LAUGHS}"),
    "aliases in a field": change_config("run:", f"{LAUGHS}run:"),
    "deep": config("run: " + "[" * 3000),
    "no yaml": config("run: ["),
    "a list": config("- a"),
    "unknown kind": change_config("kind: indexed_job", "kind: space_job"),
    "newer schema": change_config("schema_version: 3", "schema_version: 9"),
    "name of another run": change_config("run_id: bad", "run_id: good"),
    "command of numbers": job({"work": {**WORK, "mode": "command", "command": [1]}, "number": 1}),
    "command of one text": job({"work": {**WORK, "command": "ls"}, "number": 1}),
    "unknown mode": job({"work": {**WORK, "mode": "dance"}, "number": 1}),
    "unknown launcher": job({"work": {**WORK, "launcher": ["x"]}, "number": 1}),
    "number is text": job({"work": WORK, "number": "one"}),
    "number is a list": job({"work": WORK, "number": [1]}),
    "nonce is a list": job({"work": WORK, "number": 1, "nonce": [1]}),
    "work is a list": job({"work": [], "number": 1}),
    "job is a list": job([]),
    "job is deep": job("[" * 100_000),
    "job is no json": job("{"),
    "no job": lambda run: run.kube.change("ConfigMap", "bad-config", {"data": {JOB_FILE: None}}),
    "no data": lambda run: run.kube.change("ConfigMap", "bad-config", {"data": None}),
}


@pytest.mark.parametrize("damage", BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_unreadable_record_has_a_row_and_an_error(kube: KubeServer, damage: Callable[[FakeRun], None]) -> None:
    launch(kube, name="good").pod(0)
    bad = launch(kube, name="bad")
    damage(bad)
    cluster = kube.cluster()
    rows = {row.run_id: row for row in all_status(cluster, "team")}
    assert (rows["good"].state, rows["bad"].state) == ("starting", "unreadable")
    assert rows["bad"].why_short
    assert len(rows["bad"].why_short) < 600
    assert [record.run_id for record in list_records(cluster, "team")] == ["good"]
    with pytest.raises(UsageError) as refused:
        find_record(cluster, "bad", "team")
    assert "kubectl delete" in (refused.value.remedy or "")


def test_record_with_another_name_is_ignored(kube: KubeServer) -> None:
    launch(kube, name="good")
    copy = kube.objects["configmaps", "team", "good-config"]
    kube.add({**copy, "metadata": {"name": "good-too", "labels": copy["metadata"]["labels"]}})
    states = [(row.run_id, row.state) for row in all_status(kube.cluster(), "team")]
    assert sorted(states) == [("good", "pending"), ("good", "unreadable")]


def test_namespace_with_only_unreadable_records(kube: KubeServer) -> None:
    BAD_RECORDS["no job"](launch(kube, name="bad"))
    assert [row.state for row in all_status(kube.cluster(), "team")] == ["unreadable"]


@pytest.mark.parametrize("label", ["abc", "", "-1", "1e3", "9" * 40, "\u0665"])
@pytest.mark.parametrize("kind", ["indexed_job", "pytorch_job"])
def test_pod_with_invalid_index_is_ignored_with_a_warning(kube: KubeServer, kind: str, label: str) -> None:
    launch(kube, name="good").pod(0)
    run = launch(kube, kind, name="bad")
    run.pod(0)
    strange = run.pod(1)
    kube.change("Pod", strange, {"metadata": {"labels": {INDEX_LABELS[kind]: label}}})
    cluster = kube.cluster()
    rows = {row.run_id: row for row in all_status(cluster, "team")}
    one = ObservedRun(cluster, run.record, with_log=False).status
    assert [pod.index for pod in one.pods] == [pod.index for pod in rows["bad"].pods] == [0]
    if label:
        assert strange in str(one.unseen)
        assert strange in str(rows["bad"].unseen)
        assert any(strange in line for line in explain(ObservedRun(cluster, run.record)).evidence)
    assert rows["good"].unseen is None


BAD_STATUS = {
    "containers are texts": {"containerStatuses": ["x"]},
    "no name": {"containerStatuses": [{}]},
    "state is a list": {"containerStatuses": [{"name": "trainer", "state": [1]}]},
    "conditions": {"conditions": [{}], "containerStatuses": []},
    "time": {"conditions": [{"type": "Ready", "status": "False", "reason": "NodeNotReady", "lastTransitionTime": "x"}]},
}


@pytest.mark.parametrize("bad", BAD_STATUS.values(), ids=BAD_STATUS)
def test_malformed_objects(kube: KubeServer, bad: dict[str, Any]) -> None:
    """An API server rejects such pods, but custom resources may have any shape."""
    launch(kube, name="good").pod(0)
    run = launch(kube, name="bad")
    run.pod(0)
    kube.change("Pod", run.pods[0], {"status": bad})
    cluster = kube.cluster()
    rows = {row.run_id: row.state for row in all_status(cluster, "team")}
    assert rows == {"good": "starting", "bad": "unknown"}
    with pytest.raises(UsageError):
        _ = ObservedRun(cluster, run.record).status
    with pytest.raises(UsageError):
        explain(ObservedRun(cluster, run.record))


def test_remedies_name_cluster_and_resource(kube: KubeServer, tmp_path: Path) -> None:
    cluster = Cluster.connect(str(kube.kubeconfig(tmp_path)), "there")
    run = launch(kube, "train_job", name="bad")
    run.pod(0)
    kube.change("Pod", run.pods[0], {"status": BAD_STATUS["no name"]})
    with pytest.raises(UsageError) as refused:
        _ = ObservedRun(cluster, run.record).status
    remedies = [str(refused.value.remedy)]
    BAD_RECORDS["job is a list"](run)
    with pytest.raises(UsageError) as refused:
        find_record(cluster, "bad", "team")
    remedies.append(str(refused.value.remedy))
    assert all(remedy.endswith(cluster.place("team")) for remedy in remedies)
    assert cluster.place("team").startswith(" -n team --kubeconfig ")
    kinds = remedies[1].partition("kubectl delete ")[2].split()[0].split(",")
    assert kinds == ["all", "configmap", "networkpolicy", "poddisruptionbudget", "trainjobs", "trainingruntimes"]


def call(command: Callable[..., None], kube: KubeServer, directory: Path, *words: str) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [*words, "--kubeconfig", str(kube.kubeconfig(directory))])


@pytest.mark.parametrize("command", [stop.command, delete.command])
@pytest.mark.parametrize("bad", BAD_STATUS.values(), ids=BAD_STATUS)
def test_malformed_runs_can_be_deleted(
    kube: KubeServer, tmp_path: Path, bad: dict[str, Any], command: Callable[..., None]
) -> None:
    run = launch(kube, name="bad")
    run.pod(0)
    overdue = {"deletionTimestamp": "2026-01-01T00:00:00Z"}  # nothing here removes the pod, and it is not waited for
    kube.change("Pod", run.pods[0], {"status": bad, "metadata": overdue})
    result = call(command, kube, tmp_path, "bad")
    assert result.exit_code == 0, result.exception
    assert ("jobs", "team", "bad") not in kube.objects


def test_delete_all_continues_after_a_failure(
    kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run-a", "run-b", "run-c"):
        launch(kube, name=name)
    real = apply.delete

    def fail_at_b(cluster: Cluster, record: Record, *others: Any) -> list[str]:
        if record.run_id == "run-b":
            raise UsageError("no")
        return real(cluster, record, *others)

    monkeypatch.setattr(apply, "delete", fail_at_b)
    result = call(delete.command, kube, tmp_path, "--all", "--yes", "--json")
    assert isinstance(result.exception, ClusterError)
    assert "run-b: no" in result.exception.what
    assert json.loads(result.stdout)["deleted"] == ["run-a", "run-c"]
    assert json.loads(result.stdout)["failed"] == ["run-b"]
    assert [record.run_id for record in list_records(kube.cluster(), "team")] == ["run-b"]


@pytest.mark.parametrize("body", ["{}", "[]", "<html>", '{"items": [{}]}', '{"items": 3}', '{"metadata": 3}'])
@pytest.mark.parametrize("command", [status, why, logs, stop, delete])
def test_server_that_is_not_an_api_server(kube: KubeServer, tmp_path: Path, command: ModuleType, body: str) -> None:
    kube.gate = lambda *_: (200, body)
    result = call(command.command, kube, tmp_path, "demo")
    assert isinstance(result.exception, ClusterError)
    assert result.exception.exit_code == 69


def test_status_command_with_malformed_runs(kube: KubeServer, tmp_path: Path) -> None:
    launch(kube, name="good").pod(0)
    BAD_RECORDS["command of numbers"](launch(kube, name="bad"))
    options = ["--kubeconfig", str(kube.kubeconfig(tmp_path))]

    def call(command: Callable[..., None], *words: str) -> str:
        app = typer.Typer()
        app.command()(command)
        return CliRunner().invoke(app, [*words, *options], catch_exceptions=False).stdout

    table = [line.split() for line in call(status.command).splitlines()]
    assert {row[0]: row[1] for row in table[1:]} == {"good": "starting", "bad": "unreadable"}
    every = json.loads(call(status.command, "--json"))["runs"]
    assert {row["run_id"]: row["state"] for row in every} == {"good": "starting", "bad": "unreadable"}
    for command in (status.command, why.command, logs.command, stop.command):
        with pytest.raises(UsageError):
            call(command, "bad")
