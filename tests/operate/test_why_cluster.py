"""llmtrain why: what only a real cluster showed to be said wrongly (tests/end_to_end/test_why.py), without one."""

import time
from dataclasses import replace
from typing import Any

import pytest
from kube_runs import STEP, FakeRun, launch, waiting
from why_runs import CONFIG, DATA, GONE, JOIN, KINDS, WATCHDOG, end, fail, no_room, say, why

from kube_server import KubeServer
from llmtrain.operate.guard.stalled_pods import find_stalled, replace_stalled
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
def test_the_command_that_makes_a_secret(kube: KubeServer, name: str, command: str) -> None:
    own = "launch.env_secrets=[s3]" if name == "s3" else f"launch.hf_token_secret.name={name}"
    run = launch(kube, "indexed_job", own)
    run.pod(0, waiting("CreateContainerConfigError", f'secret "{name}" not found'))
    found = why(run)
    assert found.cause == "container_config"
    assert found.remedy.startswith(f"Make it: {command} Pods start by themselves")


def test_a_claim_that_was_named_and_one_that_was_made(kube: KubeServer) -> None:
    run = launch(kube, "indexed_job", "launch.data_volume.claim=texts")
    no_room(run, 0, '0/3 nodes are available: persistentvolumeclaim "texts" not found. not found')
    assert why(run).remedy.endswith("llmtrain resume demo --set launch.data_volume.claim=NAME.")
    own = launch(kube, name="own")
    kube.remove("PersistentVolumeClaim", "own-runs")
    no_room(own, 0, '0/3 nodes are available: persistentvolumeclaim "own-runs" not found. not found')
    found = why(own)
    assert (found.cause, found.what) == ("claim", "The claim own-runs is not there.")
    assert "llmtrain resume own makes it anew" in found.remedy


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_that_was_deleted(kube: KubeServer, kind: str) -> None:
    """Node 0 waits longest, and knows least."""
    run = launch(kube, kind)
    end(run, 1, 69, *JOIN, ago_sec=20)
    end(run, 0, 69, *NOT_JOINED)
    found = why(run)
    assert found.cause == "master_unreachable"
    assert found.what.startswith("The master (node 0) never came up: ")
    assert "the name demo-0.demo does not resolve" in found.what
    if kind in OWN_SERVICE:
        kube.remove("Service", "demo")
        found = why(run)
        assert found.cause == "master_unreachable"
        assert found.what.startswith("The Service demo is gone")
        assert found.evidence[0] == "Service demo: not there."
        assert "llmtrain resume demo makes it anew" in found.remedy


def test_a_master_that_runs_and_is_not_reached(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    end(run, 1, 69, *JOIN)
    found = why(run)
    assert (found.cause, found.what[:45]) == ("master_unreachable", "The master (node 0) runs, but is not reached:")


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_still_hangs_holds_the_others_up(kube: KubeServer, kind: str) -> None:
    run = launch(kube, kind)
    run.pod(1)
    run.set(1, started(ago_sec=100))
    end(run, 0, 75, WATCHDOG, ago_sec=10)
    found = why(run)
    assert found.cause == "rank_hung"
    assert "llmtrain recover demo " in found.remedy
    pods, _ = find_stalled(run.cluster, run.record, 60.0)
    assert [(pod.name, pod.ranks) for pod in pods] == [(run.pods[1], "1")]
    assert f"{run.pods[1]} still runs: the others, started again, wait for it." in found.evidence
    run.set(1, started(ago_sec=5))
    found = why(run)
    assert (found.cause, "recover" in found.remedy) == ("rank_hung", False), "it was made anew"
    assert find_stalled(run.cluster, run.record, 60.0)[0] == []


def silent(kube: KubeServer, monkeypatch: pytest.MonkeyPatch, dead: list[int]) -> FakeRun:
    run = launch(kube, "indexed_job", "launch.nodes=4")
    for index in range(4):
        run.pod(index)
    say(run, 0, STEP.format(7), ago_sec=300)
    beats = Stall(300, dead, [], dict.fromkeys(range(4), 7))
    monkeypatch.setattr(why_module, "watch_heartbeats", lambda *_: beats)
    return run


@pytest.mark.parametrize(("dead", "what"), [
    ([2], "Rank 2 hangs: its heart has stopped, and the others wait for it."),
    ([1, 2], "Ranks 1, 2 hang: their hearts have stopped, and the others wait for them."),
    ([0, 1, 2, 3], "Every rank hangs: no heart beats any more."),
])  # fmt: skip
def test_hearts_that_have_stopped(
    kube: KubeServer, monkeypatch: pytest.MonkeyPatch, dead: list[int], what: str
) -> None:
    run = silent(kube, monkeypatch, dead)
    found = why(run)
    assert (found.cause, found.what) == ("rank_hung", what)
    names = [run.pods[rank] for rank in dead]
    assert f"llmtrain recover demo replaces {', '.join(names)}" in found.remedy
    assert find_stalled(run.cluster, run.record, 400.0)[0] == [], "not silent for that long"
    pods, _ = find_stalled(run.cluster, run.record, 60.0)
    assert [pod.name for pod in pods] == names
    assert replace_stalled(run.cluster, "team", [replace(pod, uid="of-the-one-before") for pod in pods]) == []
    assert replace_stalled(run.cluster, "team", pods) == pods
    assert not {("pods", "team", name) for name in names} & set(kube.objects)
    assert replace_stalled(run.cluster, "team", pods) == []


def test_a_killed_pod_that_is_gone(kube: KubeServer) -> None:
    run = launch(kube, "pytorch_job")
    run.pod(0)
    run.pod(1)
    run.event("ExitedWithCode", "Pod: team.demo-worker-1 exited with code 137")
    found = why(run)
    assert (found.cause, "its pod is gone, and with it whether it was for memory" in found.what) == ("killed", True)
    assert "llmtrain resume demo --set launch.resources.memory=8Gi" in found.remedy


@pytest.mark.parametrize(("code", "lines"), [(64, CONFIG), (65, DATA)])
def test_a_mistake_is_mended_in_the_config(kube: KubeServer, code: int, lines: list[str]) -> None:
    run = launch(kube)
    end(run, 1, code, *lines)
    end(run, 0, 75, *GONE)
    fail(run)
    assert why(run).remedy.endswith("llmtrain resume demo, with --set FIELD=VALUE for what changes in the config.")


@pytest.mark.parametrize("kind", ["indexed_job", "job_set"])
def test_a_deadline_whose_pods_are_still_ending(kube: KubeServer, kind: str) -> None:
    run = launch(kube, kind, "launch.active_deadline_sec=60")
    for index in (0, 1):
        run.pod(index)
        run.set(index, started(ago_sec=60), is_leaving=True)
    assert why(run).cause == "interrupted"
    row = {"type": "FailureTarget", "status": "True", "reason": "DeadlineExceeded", "message": "Job was active longer"}
    if kind == "indexed_job":
        kube.change("Job", "demo", {"status": {"conditions": [row]}})
    else:
        inner = {"name": "demo-node-0", "namespace": "team", "labels": run.plan.labels}
        kube.add({"apiVersion": "batch/v1", "kind": "Job", "metadata": inner, "status": {"conditions": [row]}})
    found = why(run)
    assert found.cause == "deadline_exceeded"
    assert found.evidence == ["Condition FailureTarget of the job: DeadlineExceeded: Job was active longer"]
