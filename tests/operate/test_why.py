"""llmtrain why: each situation has exactly one cause, with evidence."""

import itertools
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from kube_runs import STEP, FakeRun, ended, launch, running, waiting
from typer.testing import CliRunner
from why_runs import (
    CHECKPOINT,
    CONFIG,
    CRASH,
    DATA,
    GAVE_UP,
    GONE,
    IDLE,
    JOIN,
    KINDS,
    NAN,
    NO_GPU,
    QUOTA,
    WATCHDOG,
    at,
    end,
    fail,
    lose,
    say,
    shown,
    unschedulable_pod,
    why,
)

from kube_server import KubeServer, now
from llmtrain.commands import cluster_options
from llmtrain.commands import why as why_command
from llmtrain.errors import (
    CheckpointError,
    DataError,
    Interrupted,
    JoinError,
    PeerLost,
    TrainingFailed,
    UsageError,
)
from llmtrain.kubernetes.client import plural_of
from llmtrain.launch.pod_task import PodTask
from llmtrain.launch.record import ENDED_AS, STOPPED_AT
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.all_runs import all_status
from llmtrain.operate.why import causes, run_reports
from llmtrain.operate.why import explain as why_module
from llmtrain.operate.why import stall as stall_module
from llmtrain.operate.why.explain import explain
from llmtrain.operate.why.snapshot import Stall
from llmtrain.runs.exit_report import ExitReport

# (Exit code, reason, log lines) of pod 1 and of pod 0; the cause; facts in the output.
EXITS: dict[str, tuple[tuple[int, str, list[str]], tuple[int, str, list[str]], str, list[str]]] = {
    "config": ((64, "", CONFIG), (64, "", CONFIG), "bad_config", ["model.name 'gtp' is unknown", "resume demo"]),
    "config on one": ((64, "", CONFIG), (75, "", GONE), "bad_config", ["model.name 'gtp' is unknown"]),
    "nan": (
        (65, "", NAN),
        (65, "", NAN),
        "nan",
        ["loss of step 8 is nan", "trainer.lr", "llmtrain launch --config CONFIG --name NEW"],
    ),
    "data": ((65, "", DATA), (75, "", GONE), "bad_data", ["/data/train.jsonl, line 3", "data.text_field"]),
    "checkpoint": ((65, "", CHECKPOINT), (65, "", CHECKPOINT), "bad_checkpoint", ["None of the 2 checkpoints"]),
    "given up": ((65, "", GAVE_UP), (65, "", GAVE_UP), "given_up", ["crashed 3 times in a row"]),
    "memory": (
        (137, "OOMKilled", []),
        (75, "", GONE),
        "oom_killed",
        ["4Gi", "launch.resources.memory=8Gi", "pod 0: 75"],
    ),
    "killed": ((137, "Error", []), (75, "", GONE), "killed", ["SIGKILL", "launch.resources.memory"]),
    "hung": (
        (75, "", GONE),
        (75, "", [WATCHDOG]),
        "rank_hung",
        ["Rank 1 hung", "Rank 1 is in pod 1 (demo", "--rank 1"],
    ),
    "no master": ((69, "", JOIN), (75, "", GONE), "master_unreachable", ["demo-0.demo", "600.0 s"]),
    "crash": (
        (1, "", CRASH),
        (75, "", GONE),
        "crash",
        ["RuntimeError: expected scalar type", "Pod 1 (demo", "--rank 1"],
    ),
    "crash while others wait": (
        (69, "", JOIN),
        (1, "", CRASH),
        "crash",
        ["RuntimeError: expected scalar type", "Pod 0 (demo"],
    ),
    "peer": ((75, "", GONE), (75, "", GONE), "peer_lost", ["Connection closed by peer"]),
    "interrupted": (
        (75, "", ["stopped: Stopped at step 5 as told."]),
        (75, "", GONE),
        "interrupted",
        ["Stopped at step 5"],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EXITS)
def test_cause_of_exits(kube: KubeServer, kind: str, name: str) -> None:
    pod1, pod0, cause, facts = EXITS[name]
    run = launch(kube, kind)
    for index, (code, reason, lines) in ((1, pod1), (0, pod0)):
        end(run, index, code, *lines, reason=reason)
    if {64, 65} & {pod1[0], pod0[0]}:
        fail(run)
    found = why(run)
    assert found.cause == cause, found
    for fact in facts:
        assert fact in shown(found), found
    assert found.evidence
    assert found.remedy


REPORTS = {
    "bad_config": UsageError("gtp is unknown."),
    "nan": TrainingFailed("x", reason="not_finite"),
    "gpu_out_of_memory": TrainingFailed("x", reason="gpu_memory"),
    "disk_full": TrainingFailed("x", reason="disk_full"),
    "given_up": TrainingFailed("x", reason="gave_up"),
    "bad_checkpoint": CheckpointError("x"),
    "bad_data": DataError("x"),
    "master_unreachable": JoinError("x", reason="master_unreachable"),
    "rank_hung": PeerLost("x", reason="no_progress"),
    "interrupted": Interrupted("x"),
    "peer_lost": PeerLost("x"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cause", REPORTS)
def test_exit_reports_are_enough_without_access_to_logs(kube: KubeServer, kind: str, cause: str) -> None:
    kube.forbidden.add("log")
    run, error = launch(kube, kind), REPORTS[cause]
    for index in (1, 0):
        end(run, index, error.exit_code, report=ExitReport.of(error))
    fail(run)
    found = why(run)
    assert found.cause == cause, found
    assert error.what in shown(found)


def test_report_in_the_run_directory_explains_a_deleted_pod(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    run = launch(kube, "pytorch_job")
    run.pod(0)
    run.pod(1, waiting("ContainerCreating"))
    run.event("ExitedWithCode", "Pod: team.demo-worker-1 exited with code 197")
    report = ExitReport(69, "JoinError", "processes_missing", "1 of 2 missing", pod="demo-worker-1", time=now())
    old = replace(report, message="another launch", time="2020-01-01T00:00:00Z")
    monkeypatch.setattr(run_reports, "read_run_reports", lambda *_: [old, report])
    found = why(run)
    assert found.cause == "master_unreachable"
    assert report.message in shown(found)
    assert old.message not in shown(found)


def test_reports_in_the_run_directory_explain_the_restart_of_a_job_set(
    kube: KubeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launch(kube, "job_set")
    run.pod(0, waiting("ContainerCreating"))
    reports = [ExitReport(75, "PeerLost", "no_progress", "No progress", node_rank=0, pod="demo-0-x", time=now())]
    monkeypatch.setattr(run_reports, "read_run_reports", lambda *_: reports)
    assert why(run).cause == "starting"
    kube.change("JobSet", "demo", {"status": {"restarts": 1}})
    assert why(run).cause == "rank_hung"


@pytest.mark.parametrize("code", [0, 64, 65])
def test_stateful_set_ends_without_access_to_logs(kube: KubeServer, code: int) -> None:
    """Its containers exit once, and wait after the restart."""
    kube.forbidden.add("log")
    run = launch(kube, "stateful_set")
    for index in (0, 1):
        run.pod(index)
        assert ObservedRun(run.cluster, run.record).status.state in ("running", "starting")
        run.set(index, running(), restarts=1, last=ended(code))
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.exit_code, status.restarts) == ("failed" if code else "finished", code, 0)


def test_oom_kill_shows_current_memory_usage(kube: KubeServer) -> None:
    run = launch(kube)
    end(run, 1, 137, reason="OOMKilled")
    name = run.pod(0)
    kube.metrics = {name: {"cpu": "1", "memory": "3984588Ki"}}
    found = why(run)
    assert found.cause == "oom_killed"
    assert any(name in line and "3.8 GiB" in line for line in found.evidence)
    assert "llmtrain stop demo, then llmtrain resume demo --set launch.resources.memory=8Gi" in found.remedy


def test_after_giving_up_the_cause_is_that_of_the_crashes(kube: KubeServer) -> None:
    run = launch(kube)
    end(run, 1, 137, reason="OOMKilled", ago_sec=60)
    end(run, 0, 75, *GONE, ago_sec=60)
    for index in (0, 1):
        run.pod(index)
        end(run, index, 65, *GAVE_UP)
    fail(run)
    found = why(run)
    assert found.cause == "oom_killed"
    assert "llmtrain resume demo --set launch.resources.memory=8Gi" in found.remedy
    assert any("gave up: Run 'demo' crashed 3 times" in line for line in found.evidence)


def test_rank_killed_after_it_was_reported_hung(kube: KubeServer) -> None:
    run = launch(kube)
    end(run, 0, 75, WATCHDOG, ago_sec=40)
    end(run, 1, 137, ago_sec=5)
    assert why(run).cause == "rank_hung"
    other = launch(kube, name="other")
    end(other, 1, 137, ago_sec=40)
    end(other, 0, 75, WATCHDOG, ago_sec=5)
    assert why(other).cause == "killed"


def test_exits_long_ago_are_ignored(kube: KubeServer) -> None:
    run = launch(kube)
    end(run, 1, 137, reason="OOMKilled", ago_sec=8000)
    run.pod(1)
    end(run, 0, 75, WATCHDOG)
    assert why(run).cause == "rank_hung"


def test_recreated_pod_of_a_pytorch_job(kube: KubeServer) -> None:
    """Its operator deletes failed pods; an event remains."""
    run = launch(kube, "pytorch_job")
    run.pod(0)
    run.pod(1, waiting("ContainerCreating"))
    assert why(run).cause == "starting"
    run.event("ExitedWithCode", "Pod: team.demo-worker-1 exited with code 137")
    found = why(run)
    assert (found.cause, "Pod 1 (demo-worker-1)" in found.what) == ("killed", True)


# Conditions of the job.


@pytest.mark.parametrize(("kind", "reason", "message"), [
    ("indexed_job", "DeadlineExceeded", "Job was active longer than specified deadline"),
    ("pytorch_job", "PyTorchJobFailed", "Job demo has failed because it was active longer than specified deadline"),
    ("train_job", "DeadlineExceeded", "TrainJob exceeded its active deadline"),
    ("job_set", "", ""),
])  # fmt: skip
def test_deadline_exceeded(kube: KubeServer, kind: str, reason: str, message: str) -> None:
    run = launch(kube, kind, "launch.active_deadline_sec=60")
    for index in (0, 1):
        end(run, index, 75, "stopped: Stopped at step 5 as told.")
    if reason:
        run.finish("Failed", reason=reason, message=message)
    else:  # the JobSet only reports that its Job failed
        fail(run)
        condition = {
            "type": "Failed",
            "status": "True",
            "reason": "DeadlineExceeded",
            "message": "Job was active longer",
        }
        inner = {"name": "demo-node-0", "namespace": "team", "labels": run.plan.labels}
        kube.add({"apiVersion": "batch/v1", "kind": "Job", "metadata": inner, "status": {"conditions": [condition]}})
    found = why(run)
    assert (found.cause, found.state) == ("deadline_exceeded", "failed")
    assert "60 s" in found.what
    assert "llmtrain resume demo --set launch.active_deadline_sec=SECONDS" in found.remedy


@pytest.mark.parametrize(("kind", "reason", "message"), [
    ("indexed_job", "BackoffLimitExceeded", "Job has reached the specified backoff limit"),
    ("pytorch_job", "PyTorchJobFailed", "Job demo has failed because it has reached the specified backoff limit"),
])  # fmt: skip
def test_no_restarts_left(kube: KubeServer, kind: str, reason: str, message: str) -> None:
    run = launch(kube, kind)
    run.finish("Failed", reason=reason, message=message)
    assert why(run).cause == "no_restarts_left"
    end(run, 0, 1, *CRASH)
    assert why(run).cause == "crash", "the crashes exhausted the restarts"


def test_job_that_failed_without_a_reason(kube: KubeServer) -> None:
    run = launch(kube, "job_set")
    fail(run)
    found = why(run)
    assert (found.cause, "one or more job failures" in found.what) == ("job_failed", True)


def test_suspended_job_is_queued_with_kueue_and_suspended_without(kube: KubeServer) -> None:
    run = launch(kube, "indexed_job", "launch.queue=gpus")
    run.finish("Suspended", reason="JobSuspended", message="Job suspended")
    message = "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu, 8 more needed"
    run.event("Pending", message, "Workload", "job-demo-1a2b3")
    found = why(run)
    assert (found.cause, "queue gpus" in found.what) == ("queued", True)
    assert message in shown(found)
    by_hand = launch(kube, name="by-hand")
    by_hand.finish("Suspended", reason="JobSuspended", message="Job suspended")
    assert why(by_hand).cause == "suspended"


def workload(run: FakeRun, owner: str | None = None, **conditions: str) -> None:
    """The Workload of Kueue; a condition is `status|reason|message`."""
    job = run.kube.objects[plural_of(run.kind), "team", run.plan.run_id]
    rows = [
        {"type": kind, **dict(zip(("status", "reason", "message"), text.split("|"), strict=True))}
        for kind, text in conditions.items()
    ]
    run.kube.add(
        {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": "Workload",
            "metadata": {
                "name": f"{run.kind.lower()}-{run.plan.run_id}-1a2b3",
                "namespace": "team",
                "ownerReferences": [{"uid": owner or job["metadata"]["uid"]}],
            },
            "status": {"conditions": rows},
        }
    )


def hold_in_queue(run: FakeRun) -> None:
    """Like Kueue: jobs are suspended, pods of a StatefulSet are gated."""
    if run.plan.launch.kind == "stateful_set":
        gate = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "Scheduling blocked"}
        for index in range(2):
            run.pod(index, {}, conditions=[gate])
    else:
        run.finish("Suspended", reason="Suspended", message="suspended")


QUOTA_WAIT = "False|Pending|couldn't assign flavors: insufficient unused quota for cpu in flavor default, 200m more"


@pytest.mark.parametrize("kind", KINDS)
def test_queued_run_shows_what_it_waits_for(kube: KubeServer, kind: str) -> None:
    run = launch(kube, kind, "launch.queue=gpus")
    hold_in_queue(run)
    kube.add({"kind": "LocalQueue", "metadata": {"name": "gpus"}})
    workload(launch(kube, kind, "launch.queue=gpus", name="other"), QuotaReserved="False|Pending|of another")
    workload(run, "a-pod" if kind == "stateful_set" else None, QuotaReserved=QUOTA_WAIT, Evicted="True|Preempted|by 7")
    found = why(run)
    assert found.cause == "queued"
    assert "insufficient unused quota for cpu" in found.what
    assert "Preempted: by 7" in shown(found)
    assert "of another" not in shown(found)
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, "200m more" in (status.why_short or "")) == ("suspended", True)
    assert [row.why_short for row in all_status(run.cluster, "team") if row.run_id == "demo"] == [status.why_short]


def test_failed_sidecar_is_named(kube: KubeServer) -> None:
    run = launch(kube)
    for index in (0, 1):
        run.pod(index)
        run.end(index, 0)
    rows = kube.objects["pods", "team", run.pods[1]]["status"]["containerStatuses"]
    shipper = {"name": "shipper", "state": ended(137, "OOMKilled"), "restartCount": 0}
    kube.change("Pod", run.pods[1], {"status": {"phase": "Failed", "containerStatuses": [*rows, shipper]}})
    run.finish("Failed", reason="BackoffLimitExceeded", message="Job has reached the specified backoff limit")
    found = why(run)
    assert (found.cause, "shipper of pod 1" in found.what) == ("sidecar_failed", True)
    assert "OOMKilled" in shown(found)


def test_deactivated_workload_is_not_called_waiting(kube: KubeServer) -> None:
    run = launch(kube, "indexed_job", "launch.queue=gpus")
    hold_in_queue(run)
    workload(run, QuotaReserved="False|Inadmissible|The workload is deactivated")
    kube.add({"kind": "LocalQueue", "metadata": {"name": "gpus"}})
    kube.change("Workload", "job-demo-1a2b3", {"spec": {"active": False}})
    found = why(run)
    assert found.cause == "queued"
    assert '"active":true' in found.remedy


def test_queue_without_a_workload_names_the_priority(kube: KubeServer) -> None:
    """Kueue creates no Workload if the priority class does not exist; it says so in its own log only."""
    run = launch(kube, "indexed_job", "launch.queue=gpus", "launch.queue_priority=nosuch")
    hold_in_queue(run)
    found = why(run)
    assert (found.cause, "no Workload" in found.what) == ("queued", True)
    assert "WorkloadPriorityClass nosuch" in found.remedy


@pytest.mark.parametrize("kind", KINDS)
def test_missing_queue(kube: KubeServer, kind: str) -> None:
    run = launch(kube, kind, "launch.queue=nosuch")
    hold_in_queue(run)
    workload(run, QuotaReserved="False|Inadmissible|LocalQueue nosuch doesn't exist")
    found = why(run)
    assert found.cause == "queue_not_found"
    assert "--set launch.queue=NAME" in found.remedy
    assert "nosuch doesn't exist" in (ObservedRun(run.cluster, run.record).status.why_short or "")


@pytest.mark.parametrize("plural", ["workloads", "localqueues"])
@pytest.mark.parametrize("is_missing", [False, True])
def test_queue_that_cannot_be_read(kube: KubeServer, plural: str, is_missing: bool) -> None:
    """Forbidden by RBAC, or Kueue was uninstalled."""
    run = launch(kube, "indexed_job", "launch.queue=gpus")
    hold_in_queue(run)
    workload(run, QuotaReserved=QUOTA_WAIT)
    response = "404 page not found" if is_missing else f'User "me" cannot list resource "{plural}" in API group'
    kube.gate = lambda _, path, __: (404 if is_missing else 403, response) if f"/{plural}" in path else None
    found = why(run)
    assert found.cause == "queued"
    assert ("insufficient" in found.what) == (plural == "localqueues")
    assert any("workloads" in line for line in found.evidence) == (plural == "workloads" and not is_missing)
    assert ObservedRun(run.cluster, run.record).status.state == "suspended"


@pytest.mark.parametrize(
    ("nodes", "replicas", "remedy"),
    [("2", 3, "--nodes 3"), ("2", 1, "--nodes 1"), ("2", 0, "--replicas=2"), ("1", 2, "--nodes 2"), ("1:2", 3, "=2")],
)
def test_scaled_stateful_set(kube: KubeServer, nodes: str, replicas: int, remedy: str) -> None:
    run = launch(kube, "stateful_set", f"launch.nodes={nodes}", "trainer.grad_accum_steps=2")
    most = int(nodes[-1])
    for index in range(replicas):
        run.pod(index)
        say(run, index, STEP.format(7) if index < most else IDLE.format(64))
    kube.change("StatefulSet", "demo", {"spec": {"replicas": replicas}})
    found = why(run)
    assert found.cause == "scaled"
    assert remedy in found.remedy
    status = ObservedRun(run.cluster, run.record).status
    assert status.state == ("running" if replicas >= most else "restarting" if replicas else "pending")
    assert [pod.index for pod in status.pods] == list(range(min(replicas, most)))
    assert f"scaled to {replicas}" in (status.why_short or "")
    kube.change("StatefulSet", "demo", {"spec": {"replicas": most}})
    assert why(run).cause != "scaled"


def test_scaled_stateful_set_finishes_with_its_run(kube: KubeServer) -> None:
    """The surplus pod waits with 64, but the run has finished."""
    run = launch(kube, "stateful_set")
    for index, code in enumerate((0, 0, 64)):
        run.pod(index)
        run.say(index, IDLE.format(code))
    kube.change("StatefulSet", "demo", {"spec": {"replicas": 3}})
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.exit_code) == ("finished", 0)
    assert why(run).cause == "finished"


def test_elastic_stateful_set_scaled_within_its_range_is_healthy(kube: KubeServer) -> None:
    run = launch(kube, "stateful_set", "launch.nodes=1:2", "trainer.grad_accum_steps=2")
    run.pod(0)
    say(run, 0, STEP.format(7))
    kube.change("StatefulSet", "demo", {"spec": {"replicas": 1}})
    assert why(run).cause == "healthy"


def test_stopped_removed_incomplete_stopping(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    run.set(0, running(), is_leaving=True)
    kube.change("Job", "demo", {"metadata": {"deletionTimestamp": now()}})
    assert why(run).cause == "stopping"
    lose(run, 0, "overdue")
    assert why(run).cause == "node_lost"
    kube.remove("Job", "demo")
    kube.remove("Pod", run.pods[0])
    assert why(run).cause == "incomplete"
    run.event("SuccessfulCreate", "Created pod: demo-0-abcde")
    assert why(run).cause == "removed"
    notes = {STOPPED_AT: "2026-01-01T00:00:00Z"}
    kube.change("ConfigMap", "demo-config", {"metadata": {"annotations": notes}})
    found = why(run)
    assert (found.cause, "2026-01-01T00:00:00Z" in found.what) == ("stopped", True)
    kube.change("ConfigMap", "demo-config", {"metadata": {"annotations": {ENDED_AS: "failed"}}})
    found = why(run)
    assert (found.cause, "failed" in found.what) == ("stopped", True)


def test_elastic_run_with_fewer_pods_is_healthy(kube: KubeServer) -> None:
    run = launch(kube, "indexed_job", "launch.nodes=1:2", "trainer.grad_accum_steps=2")
    run.pod(0)
    say(run, 0, STEP.format(5))
    unschedulable_pod(run, 1, NO_GPU)
    found = why(run)
    assert (found.cause, f"{run.pods[1]}: Pending, Unschedulable" in found.evidence) == ("healthy", True)
    run.set(1, waiting("ImagePullBackOff", "not found"))
    assert why(run).cause == "healthy"


def test_command_that_is_not_in_the_image_crashes(kube: KubeServer) -> None:
    run = launch(kube)
    message = 'failed to create containerd task: exec: "python": executable file not found in $PATH: unknown'
    run.pod(0, {"terminated": {"exitCode": 128, "reason": "StartError", "message": message}})
    found = why(run)
    assert (found.cause, message in found.what) == ("crash", True)


# Starting, healthy and finished runs.

HUB = ("model.name=hf_causal_lm", "model.path=me/model")


def test_prefetching_and_prefetch_failed(kube: KubeServer) -> None:
    run = launch(kube, "indexed_job", *HUB)
    assert run.plan.is_fetching
    for index in (0, 1):
        run.pod(index, waiting("PodInitializing"))
    container = {"name": "prefetch", "state": running(), "restartCount": 0}
    kube.change("Pod", run.pods[0], {"status": {"initContainerStatuses": [container]}})
    assert why(run).cause == "prefetching"
    error = ["error: me/model is not on the hub, or private.", "  Is model.path right?"]
    kube.say(run.pods[0], *error, container="prefetch")
    kube.change("Pod", run.pods[0], {"status": {"initContainerStatuses": [{**container, "state": ended(1)}]}})
    found = why(run)
    assert (found.cause, "me/model is not on the hub" in found.what) == ("prefetch_failed", True)
    kube.change("Pod", run.pods[0], {"status": {"initContainerStatuses": [{**container, "state": ended(0)}]}})
    end(run, 0, 64, *error)
    fail(run)
    assert why(run).cause == "bad_config", "an image of the first version"
    report = ExitReport(64, "UsageError", "prefetch", "me/model is not on the hub, or private.")
    end(run, 0, 64, report=report)
    assert why(run).cause == "prefetch_failed"


def test_starting_and_pulling_image(kube: KubeServer) -> None:
    run = launch(kube)
    assert why(run).cause == "starting"
    run.pod(0, waiting("ContainerCreating"))
    run.pod(1, waiting("ContainerCreating"))
    assert why(run).cause == "starting"
    run.event("Pulling", 'Pulling image "me/train:1"', "Pod", run.pods[0])
    found = why(run)
    assert found.cause == "pulling_image"
    assert "me/train:1" in found.what
    run.event("Pulled", "Successfully pulled image", "Pod", run.pods[0])
    assert why(run).cause == "starting"


def test_no_controller_creates_pods(kube: KubeServer) -> None:
    run = launch(kube, "pytorch_job")
    kube.change("ConfigMap", "demo-config", {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}})
    found = why(run)
    assert (found.cause, "--kind indexed_job" in found.remedy) == ("no_pods_made", True)
    kube.forbidden.add("events")
    assert why(run).cause == "starting"


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_run(kube: KubeServer, kind: str) -> None:
    run = launch(kube, kind)
    run.pod(0, running(), restarts=1, last=ended(75))
    run.pod(1)
    say(run, 0, STEP.format(5))
    say(run, 1)
    found = why(run)
    assert found.as_dict() == {
        "run_id": "demo",
        "state": "running",
        "cause": "healthy",
        "what": "No problem detected: the run is training at step 5 of 30.",
        "evidence": [
            "State running, pods: 2 Running.",
            "Step 5/30, loss 5.1922, 27,610 tok/s, 0:00:09 left.",
            "Pod 0 was restarted after exit code 75 (interrupted, or a peer was lost).",
        ],
        "remedy": "No action is needed. Watch it: llmtrain status demo --watch.",
    }
    assert found.text.splitlines()[1] == "Evidence:"
    assert found.text.splitlines()[-1].startswith("Remedy: ")


def test_healthy_run_without_steps(kube: KubeServer) -> None:
    run = launch(kube, task=PodTask("command", ("python", "x.py")))
    run.pod(0)
    run.pod(1)
    assert why(run).cause == "healthy"


@pytest.mark.parametrize(("kind", "condition"), [("indexed_job", "Complete"), ("pytorch_job", "Succeeded")])
def test_finished_run(kube: KubeServer, kind: str, condition: str) -> None:
    run = launch(kube, kind)
    for index in (0, 1):
        run.pod(index)
        run.say(index, STEP.format(30))
        run.end(index)
    run.finish(condition)
    assert why(run).cause == "finished"


def fake_heartbeats(monkeypatch: pytest.MonkeyPatch, stall: Stall) -> list[float | None]:
    """Replaces the pod that reads heartbeats; returns the log ages it was called with."""
    log_ages: list[float | None] = []

    def watch(cluster: object, snapshot: object, seconds: float | None, after: float) -> Stall:  # noqa: ARG001
        log_ages.append(seconds)
        return stall

    monkeypatch.setattr(why_module, "watch_heartbeats", watch)
    return log_ages


@pytest.mark.parametrize(("stall", "cause", "word"), [
    (Stall(300, [1], [], {0: 7, 1: 7}), "rank_hung", "Rank 1 "),
    (Stall(300, [], [], {0: 7, 1: 7}), "no_progress", "at step 7."),
    (Stall(300, [], [0, 1], {0: 7, 1: 7}), "healthy", "step 7"),
    (Stall(300, error="Not allowed to create pods."), "no_progress", "Not allowed to create pods"),
])  # fmt: skip
def test_stalled_run(kube: KubeServer, monkeypatch: pytest.MonkeyPatch, stall: Stall, cause: str, word: str) -> None:
    log_ages = fake_heartbeats(monkeypatch, stall)
    run = launch(kube)
    run.pod(0)
    run.pod(1)
    say(run, 0, STEP.format(7), ago_sec=300)
    found = why(run)
    assert (found.cause, word in shown(found)) == (cause, True)
    assert 295 < (log_ages[0] or 0) < 310
    say(run, 0, STEP.format(8))
    assert (why(run).cause, len(log_ages)) == ("healthy", 1)


# Without permissions.


@pytest.mark.parametrize(("stall", "cause", "fact"), [
    (Stall(None, [1], [], {0: 7, 1: 7}), "rank_hung", "Rank 1 "),
    (Stall(None, [0, 1], [], {0: 7, 1: 7}), "rank_hung", "since step 7."),
    (Stall(None, [], [0, 1], {0: 7, 1: 7}), "healthy", "at step 7"),
    (Stall(None, [], [], {0: 7, 1: 7}), "healthy", "at step 7"),  # a long step
    (Stall(None, error="Not allowed to create pods."), "healthy", "Not allowed to create pods."),
])  # fmt: skip
def test_heartbeats_replace_a_log_that_cannot_be_read(
    kube: KubeServer, monkeypatch: pytest.MonkeyPatch, stall: Stall, cause: str, fact: str
) -> None:
    log_ages = fake_heartbeats(monkeypatch, stall)
    run = launch(kube)
    run.pod(0)
    run.pod(1)
    kube.forbidden |= {"log"}
    found = why(run)
    assert (found.cause, fact in shown(found)) == (cause, True), found
    assert log_ages == [None]


def test_run_that_ends_while_heartbeats_are_watched(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has exited sends no heartbeats either."""
    run = launch(kube)
    run.pod(0)
    run.pod(1)
    kube.forbidden |= {"log"}

    def watch(*_: object) -> Stall:
        end(run, 0, 64, *CONFIG)
        end(run, 1, 75, *GONE)
        fail(run)
        return Stall(None, [0, 1], [], {0: 7, 1: 7})

    monkeypatch.setattr(why_module, "watch_heartbeats", watch)
    assert why(run).cause == "bad_config"


@pytest.mark.parametrize(("log_age", "polls"), [(300.0, 3), (None, 15)])
def test_heartbeats_are_watched_longer_without_a_log(
    monkeypatch: pytest.MonkeyPatch, log_age: float | None, polls: int
) -> None:
    """Until a rank advances."""
    now, reads = [0.0], [0]
    heartbeats = {0: {"beat": 1, "progress": 1, "step": 7}}

    def read(reader: object) -> stall_module.Heartbeats:  # noqa: ARG001
        reads[0] += 1
        return dict(heartbeats)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(stall_module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(stall_module, "reader_pod", lambda *_: nullcontext())
    monkeypatch.setattr(stall_module, "read_heartbeats", read)
    snapshot: Any = SimpleNamespace(record=None, status=SimpleNamespace(world_size=1))
    cluster: Any = None
    found = stall_module.watch_heartbeats(cluster, snapshot, log_age, 120)
    assert (found.silent_ranks, found.advancing_ranks, reads[0]) == ([0], [], 1 + polls)
    progress = itertools.count()
    monkeypatch.setattr(stall_module, "read_heartbeats", lambda _: {0: {"beat": 1, "progress": next(progress)}})
    now[0] = 0.0
    assert stall_module.watch_heartbeats(cluster, snapshot, log_age, 120).advancing_ranks == [0]
    assert now[0] == stall_module.POLL_SEC


def test_without_access_to_events_and_logs(kube: KubeServer) -> None:
    run = launch(kube)
    kube.forbidden |= {"events", "log"}
    run.event("FailedCreate", QUOTA)
    found = why(run)
    assert found.cause == "starting"
    assert any("list events" in line for line in found.evidence)
    end(run, 0, 64, *CONFIG)
    end(run, 1, 75, *GONE)
    fail(run)
    found = why(run)
    assert (found.cause, "bad usage or config" in found.what) == ("bad_config", True)
    assert "Warning: Logs cannot be read." in found.evidence
    for code, cause in ((65, "bad_data"), (75, "peer_lost"), (69, "master_unreachable"), (1, "crash")):
        run.set(0, at(ended(code)))
        assert why(run).cause == cause
    run.set(1, at(ended(137, "OOMKilled")))
    assert why(run).cause == "oom_killed"


def test_control_characters_are_not_printed(kube: KubeServer) -> None:
    run = launch(kube)
    end(run, 0, 64, "error: \x1b[31mbad\x07")
    fail(run)
    assert "\x1b" not in why(run).text


@pytest.mark.parametrize("make", [lambda r: r.pod(0), lambda r: end(r, 0, 1, *CRASH), fail])
def test_sends_one_request_per_kind(kube: KubeServer, make: Callable[[FakeRun], object]) -> None:
    run = launch(kube)
    make(run)
    cluster, record = run.cluster, run.record
    kube.requests.clear()
    explain(ObservedRun(cluster, record))
    asked = kube.asked()
    assert (asked["GET pods"], asked["GET events"], asked["GET jobs/demo"]) == (1, 1, 1)
    assert not any(request.startswith(("POST", "PATCH", "DELETE")) for request in asked)


# From the command line.


def test_why_command(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    run = launch(kube)
    monkeypatch.setattr(cluster_options, "connect", lambda *_: run.cluster)
    app = typer.Typer()
    app.command()(why_command.command)
    end(run, 0, 64, *CONFIG)
    fail(run)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert (lines[1], lines[-1][:8]) == ("Evidence:", "Remedy: ")
    assert "model.name 'gtp' is unknown" in lines[0]
    value = json.loads(CliRunner().invoke(app, ["demo", "--json"]).stdout)
    assert list(value) == ["run_id", "state", "cause", "what", "evidence", "remedy"]
    assert (value["state"], value["cause"]) == ("failed", "bad_config")
    with pytest.raises(UsageError, match="Did you mean 'demo'"):
        why_command.command("demp")
    monkeypatch.setattr(causes, "CAUSES", ())
    assert CliRunner().invoke(app, ["demo"]).exit_code == 1
