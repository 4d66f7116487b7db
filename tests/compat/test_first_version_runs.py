"""Runs that the first version of llmtrain launched: their objects carry `llmtrain/run` and no other run label."""

from typing import Any

import pytest
from kube_runs import FakeRun
from kube_runs import launch as launch_current

from kube_server import KubeServer
from llmtrain import registry
from llmtrain.cli import main
from llmtrain.compat.records import FIRST_VERSION_RUN_LABEL
from llmtrain.config.load import load_config
from llmtrain.guard.watch import Guard
from llmtrain.kubernetes.client import plural_of
from llmtrain.kubernetes.labels import READER_LABEL, RUN_LABEL
from llmtrain.launch import lifecycle
from llmtrain.launch.manifests import render
from llmtrain.launch.plan_job import plan_job
from llmtrain.launch.record import find_record, list_records
from llmtrain.operate.fetch.reader_pod import reader_manifest
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.all_runs import all_status

KINDS = sorted(registry.KINDS)
OLD_LABELS = {"app": "llmtrain", FIRST_VERSION_RUN_LABEL: "old"}
Object = dict[str, Any]


def first_version(manifest: Any) -> Any:
    """A manifest as the first version wrote it, labels and selectors alike."""
    if isinstance(manifest, list):
        return [first_version(item) for item in manifest]
    if not isinstance(manifest, dict):
        return manifest
    renamed = {FIRST_VERSION_RUN_LABEL if key == RUN_LABEL else key: value for key, value in manifest.items()}
    renamed.pop("app.kubernetes.io/name", None)
    return {key: first_version(value) for key, value in renamed.items()}


def launch_first_version(kube: KubeServer, kind: str = "indexed_job") -> FakeRun:
    sets = [f"launch.kind={kind}", "output.run_id=old", "launch.namespace=team", "launch.nodes=2"]
    sets += ["launch.image=llmtrain:latest", "launch.image_schema=2"]  # its default, and the schema of its configs
    plan = plan_job(load_config("ddp_smoke", [*sets, "launch.pod_disruption_budget=true"]))
    for manifest in render(plan):
        kube.add(first_version(manifest))
    run = FakeRun(kube, plan)
    for index in range(2):
        name = run.pod(index)
        key = ("pods", "team", name)
        kube.objects[key] = first_version(kube.objects[key])
        assert kube.objects[key]["metadata"]["labels"].items() >= OLD_LABELS.items()
    return run


def remove_pods(kube: KubeServer, run: FakeRun) -> None:
    for name in run.pods.values():
        kube.remove("Pod", name)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "POLL_SEC", 0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_status_finds_the_run_and_its_pods(kube: KubeServer, kind: str) -> None:
    old = launch_first_version(kube, kind)
    new = launch_current(kube, kind, name="new")
    new.pod(0)
    statuses = {status.run_id: status for status in all_status(kube.cluster(), "team")}
    assert {run_id: len(status.pods) for run_id, status in statuses.items()} == {"old": 2, "new": 1}
    record = find_record(kube.cluster(), "old", "team")
    assert record.run_label == FIRST_VERSION_RUN_LABEL
    assert [pod.name for pod in ObservedRun(kube.cluster(), record).status.pods] == list(old.pods.values())
    assert find_record(kube.cluster(), "new", "team").run_label == RUN_LABEL


@pytest.mark.parametrize("verb", ["status", "logs", "why"])
def test_commands_find_the_run(kube: KubeServer, verb: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = launch_first_version(kube)
    run.say(0, "[TRAIN] step 3/30 | loss 5.0000")
    command = [verb, "old", "-n", "team", "--kubeconfig", str(kube.kubeconfig(tmp_path))]
    with pytest.raises(SystemExit) as exit_:
        main([*command, *(["--tail", "5"] if verb == "logs" else []), "--json"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert {"status": run.pods[1], "logs": "loss 5.0000", "why": "Step 3/30"}[verb] in out


def test_guard_watches_runs_of_both_versions(kube: KubeServer) -> None:
    launch_first_version(kube)
    launch_current(kube, name="new").pod(0)
    runs = Guard(kube.cluster(), "team", 60.0, None)._runs()
    assert {run: len(pods) for run, pods in runs.items()} == {"old": 2, "new": 1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", [False, True])
def test_stop_and_delete_remove_its_objects_only(kube: KubeServer, kind: str, data: bool) -> None:
    new = launch_current(kube, kind, name="new")
    new.pod(0)
    others = set(kube.objects)
    run = launch_first_version(kube, kind)
    waited: list[str] = []

    def waiting(pods: list[Object]) -> None:
        waited.extend(pod["metadata"]["name"] for pod in pods)
        remove_pods(kube, run)

    record = find_record(kube.cluster(), "old", "team")
    assert lifecycle.stop(kube.cluster(), record, waiting) == []
    assert waited == list(run.pods.values())
    lifecycle.delete(kube.cluster(), find_record(kube.cluster(), "old", "team"), data, lambda _: None)
    claims = set() if data else {("persistentvolumeclaims", "team", "old-runs")}
    assert set(kube.objects) == others | claims


@pytest.mark.parametrize("kind", KINDS)
def test_resume_keeps_the_label_of_the_first_launch(kube: KubeServer, kind: str) -> None:
    run = launch_first_version(kube, kind)
    remove_pods(kube, run)
    record = find_record(kube.cluster(), "old", "team")
    assert lifecycle.resume(kube.cluster(), record, run.plan) == []
    again = find_record(kube.cluster(), "old", "team")
    assert (again.number, again.run_label) == (2, FIRST_VERSION_RUN_LABEL)
    assert RUN_LABEL not in str({key: found for key, found in kube.objects.items() if key[2].startswith("old")})
    for manifest in again.manifests:
        created = kube.objects[plural_of(manifest["kind"]), "team", manifest["metadata"]["name"]]
        assert created["metadata"]["labels"].items() >= OLD_LABELS.items()
    assert [status.run_id for status in all_status(kube.cluster(), "team")] == ["old"]


def test_new_run_takes_over_the_claims_of_a_deleted_one(kube: KubeServer) -> None:
    run = launch_first_version(kube)
    remove_pods(kube, run)
    record = find_record(kube.cluster(), "old", "team")
    lifecycle.delete(kube.cluster(), record, False, lambda _: None)
    lifecycle.submit(kube.cluster(), run.plan, keep_data=True)
    assert find_record(kube.cluster(), "old", "team").run_label == RUN_LABEL


def test_config_map_of_another_application_is_not_a_run(kube: KubeServer) -> None:
    meta = {"name": "old-config", "namespace": "team", "labels": {"app": "llmtrain"}}
    kube.add({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {}})
    assert list_records(kube.cluster(), "team") == []


def test_reader_pod_is_scheduled_beside_its_pods(kube: KubeServer) -> None:
    launch_first_version(kube)
    record = find_record(kube.cluster(), "old", "team")
    pod = reader_manifest(record, "old-read")
    [term] = pod["spec"]["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["labelSelector"] == {"matchLabels": {FIRST_VERSION_RUN_LABEL: "old"}}
    assert pod["metadata"]["labels"][READER_LABEL] == "old"
    assert not {RUN_LABEL, FIRST_VERSION_RUN_LABEL} & set(pod["metadata"]["labels"])
