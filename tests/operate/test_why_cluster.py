"""llmtrain why: regressions first found on a real cluster (tests/end_to_end/test_why.py)."""

import time
from dataclasses import replace
from typing import Any

import pytest
from kube_runs import STEP, FakeRun, launch, waiting
from why_runs import CONFIG, DATA, GONE, JOIN, KINDS, WATCHDOG, end, fail, say, unschedulable_pod, why

from kube_server import KubeServer
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.recover import find_stalled, replace_stalled
from llmtrain.operate.why import explain as why_module
from llmtrain.operate.why.snapshot import Stall

NOT_JOINED = [
    "error: Rank 0 could not join the 2 processes at demo-0.demo:29500 after 22 s (of 15 s): The client socket has "
    "timed out after 14992ms while trying to connect to (demo-0.demo, 29500).",
]
OWN_SERVICE = ("indexed_job", "stateful_set")


def started(ago_sec: float) -> dict[str, Any]:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - ago_sec))
    return {"running": {"startedAt": stamp}}


@pytest.mark.parametrize(("name", "command"), [
    ("hf-token", "llmtrain secret hf-token --from-env-file .env. Or correct launch.hf_token_secret."),
    ("hf", "llmtrain secret hf-token --from-env-file .env --name hf. Or correct launch.hf_token_secret."),
    ("s3", "kubectl create secret generic s3 --from-env-file FILE. Or correct launch.env_secrets."),
])  # fmt: skip
def test_missing_secret_has_the_command_that_creates_it(kube: KubeServer, name: str, command: str) -> None:
    own = "launch.env_secrets=[s3]" if name == "s3" else f"launch.hf_token_secret.name={name}"
    run = launch(kube, "indexed_job", own)
    run.pod(0, waiting("CreateContainerConfigError", f'secret "{name}" not found'))
    found = why(run)
    assert found.cause == "container_config"
    assert command in found.remedy


def test_missing_claim_is_replaced_or_recreated(kube: KubeServer) -> None:
    run = launch(kube, "indexed_job", "launch.data_volume.claim=texts")
    unschedulable_pod(run, 0, '0/3 nodes are available: persistentvolumeclaim "texts" not found. not found')
    assert why(run).remedy.endswith("llmtrain resume demo --set launch.data_volume.claim=NAME.")
    own = launch(kube, name="own")
    kube.remove("PersistentVolumeClaim", "own-runs")
    unschedulable_pod(own, 0, '0/3 nodes are available: persistentvolumeclaim "own-runs" not found. not found')
    found = why(own)
    assert (found.cause, "own-runs" in found.what) == ("claim", True)
    assert "llmtrain resume own" in found.remedy
    assert "launch." not in found.remedy


@pytest.mark.parametrize("kind", KINDS)
def test_deleted_service_is_named(kube: KubeServer, kind: str) -> None:
    """Pod 0 waits longest, and has the least precise error."""
    run = launch(kube, kind)
    end(run, 1, 69, *JOIN, ago_sec=20)
    end(run, 0, 69, *NOT_JOINED)
    found = why(run)
    assert found.cause == "master_unreachable"
    assert "the name demo-0.demo does not resolve" in found.what
    if kind in OWN_SERVICE:
        kube.remove("Service", "demo")
        found = why(run)
        assert found.cause == "master_unreachable"
        assert "Service demo " in found.what
        assert found.evidence[0].startswith("Service demo: ")
        assert "llmtrain resume demo" in found.remedy


def test_unreachable_master_says_whether_pod_0_is_running(kube: KubeServer) -> None:
    run = launch(kube)
    end(run, 1, 69, *JOIN)
    missing = why(run)
    run.pod(0)
    unreachable = why(run)
    assert (missing.cause, unreachable.cause) == ("master_unreachable", "master_unreachable")
    assert missing.what != unreachable.what
    assert f"Pod 0: {run.pods[0]}, Running." in unreachable.evidence


@pytest.mark.parametrize("kind", KINDS)
def test_hung_rank_that_still_runs_needs_recover(kube: KubeServer, kind: str) -> None:
    run = launch(kube, kind)
    run.pod(1)
    run.set(1, started(ago_sec=100))
    end(run, 0, 75, WATCHDOG, ago_sec=10)
    found = why(run)
    assert found.cause == "rank_hung"
    assert "llmtrain recover demo" in found.remedy
    pods, _ = find_stalled(ObservedRun(run.cluster, run.record), 60.0)
    assert [(pod.name, pod.ranks) for pod in pods] == [(run.pods[1], "1")]
    assert any(line.startswith(f"{run.pods[1]} is still running") for line in found.evidence)
    run.set(1, started(ago_sec=5))
    found = why(run)
    assert (found.cause, "recover" in found.remedy) == ("rank_hung", False), "it was replaced"
    assert find_stalled(ObservedRun(run.cluster, run.record), 60.0)[0] == []


def stalled_run(kube: KubeServer, monkeypatch: pytest.MonkeyPatch, silent_ranks: list[int]) -> FakeRun:
    run = launch(kube, "indexed_job", "launch.nodes=4")
    for index in range(4):
        run.pod(index)
    say(run, 0, STEP.format(7), ago_sec=300)
    stall = Stall(300, silent_ranks, [], dict.fromkeys(range(4), 7))
    monkeypatch.setattr(why_module, "watch_heartbeats", lambda *_: stall)
    return run


@pytest.mark.parametrize(("ranks", "words"), [
    ([2], ["Rank 2 "]),
    ([1, 2], ["Ranks 1, 2 "]),
    ([0, 1, 2, 3], ["No rank ", "5m"]),
])  # fmt: skip
def test_ranks_without_heartbeats_are_named_and_replaced(
    kube: KubeServer, monkeypatch: pytest.MonkeyPatch, ranks: list[int], words: list[str]
) -> None:
    run = stalled_run(kube, monkeypatch, ranks)
    found = why(run)
    assert found.cause == "rank_hung"
    assert [word for word in words if word not in found.what] == []
    names = [run.pods[rank] for rank in ranks]
    assert "llmtrain recover demo" in found.remedy
    assert ", ".join(names) in found.remedy
    assert find_stalled(ObservedRun(run.cluster, run.record), 400.0)[0] == [], "it has logged something since"
    pods, _ = find_stalled(ObservedRun(run.cluster, run.record), 60.0)
    assert [pod.name for pod in pods] == names
    assert (
        replace_stalled(ObservedRun(run.cluster, run.record), [replace(pod, uid="of-an-earlier-pod") for pod in pods])
        == []
    )
    assert replace_stalled(ObservedRun(run.cluster, run.record), pods) == pods
    assert not {("pods", "team", name) for name in names} & set(kube.objects)
    assert replace_stalled(ObservedRun(run.cluster, run.record), pods) == []


def test_killed_pod_that_was_deleted(kube: KubeServer) -> None:
    run = launch(kube, "pytorch_job")
    run.pod(0)
    run.pod(1)
    run.event("ExitedWithCode", "Pod: team.demo-worker-1 exited with code 137")
    found = why(run)
    assert (found.cause, "its pod was deleted" in found.what) == ("killed", True)
    assert "llmtrain resume demo --set launch.resources.memory=8Gi" in found.remedy


@pytest.mark.parametrize(("code", "lines"), [(64, CONFIG), (65, DATA)])
def test_user_error_is_resumed_with_changed_config(kube: KubeServer, code: int, lines: list[str]) -> None:
    run = launch(kube)
    end(run, 1, code, *lines)
    end(run, 0, 75, *GONE)
    fail(run)
    remedy = why(run).remedy
    assert "llmtrain resume demo" in remedy
    assert "--set FIELD=VALUE" in remedy


@pytest.mark.parametrize("kind", ["indexed_job", "job_set"])
def test_deadline_while_pods_are_terminating(kube: KubeServer, kind: str) -> None:
    run = launch(kube, kind, "launch.active_deadline_sec=60")
    for index in (0, 1):
        run.pod(index)
        run.set(index, started(ago_sec=60), is_leaving=True)
    assert why(run).cause == "interrupted"
    condition = {
        "type": "FailureTarget",
        "status": "True",
        "reason": "DeadlineExceeded",
        "message": "Job was active longer",
    }
    if kind == "indexed_job":
        kube.change("Job", "demo", {"status": {"conditions": [condition]}})
    else:
        inner = {"name": "demo-node-0", "namespace": "team", "labels": run.plan.labels}
        kube.add({"apiVersion": "batch/v1", "kind": "Job", "metadata": inner, "status": {"conditions": [condition]}})
    found = why(run)
    assert found.cause == "deadline_exceeded"
    assert found.evidence == ["Condition FailureTarget of the job: DeadlineExceeded: Job was active longer"]
