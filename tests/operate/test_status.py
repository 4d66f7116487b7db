"""The status of a run in each of its states."""

import time

import pytest
from kube_runs import STEP, ended, launch, running, waiting

from kube_server import KubeServer
from limits import limit
from llmtrain.distributed.platform_codes import IDLE_MARK, pytorchjob_code
from llmtrain.kubernetes.client import Object
from llmtrain.launch.pod_task import PodTask
from llmtrain.launch.record import ENDED_AS, STOPPED_AT
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.all_runs import all_status
from llmtrain.operate.status.pods import worst_code
from llmtrain.operate.status.tables import run_text, runs_table

KINDS = ["indexed_job", "stateful_set", "pytorch_job", "train_job", "job_set"]
IDLE = "[DDP] " + IDLE_MARK + " {}; a StatefulSet would start this again"
SIXTEEN = ("launch.nodes=16", "trainer.grad_accum_steps=16")
UNSCHEDULABLE = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes: no cpu"}]


@pytest.mark.parametrize("kind", KINDS)
def test_from_pending_to_running(kube: KubeServer, kind: str) -> None:
    run = launch(kube, kind, "launch.processes_per_node=2")
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.pods, status.world_size, status.max_steps) == ("pending", [], 4, 30)
    run.pod(0, waiting("ContainerCreating"))
    run.pod(1, {}, conditions=UNSCHEDULABLE)
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.why_short) == ("pending", "unschedulable: 0/2 nodes: no cpu (pod 1)")
    assert [(pod.index, pod.ranks, pod.phase, pod.reason) for pod in status.pods] == [
        (0, "0-1", "Pending", None),
        (1, "2-3", "Pending", "Unschedulable"),
    ]
    run.set(0, running())
    assert ObservedRun(run.cluster, run.record).status.state == "starting"
    run.set(1, running())
    run.say(0, "[DDP] 4 processes, backend gloo")
    assert ObservedRun(run.cluster, run.record).status.state == "starting"
    run.say(0, STEP.format(5))
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.why_short) == ("running", None)
    assert (status.step, status.loss, status.tokens_per_second, status.time_left) == (5, 5.1922, 27610, "0:00:09")
    assert status.age_sec < 60


@pytest.mark.parametrize(("kind", "condition"), [
    ("indexed_job", "Complete"),
    ("pytorch_job", "Succeeded"),
    ("train_job", "Complete"),
    ("job_set", "Completed"),
])  # fmt: skip
def test_finished(kube: KubeServer, kind: str, condition: str) -> None:
    run = launch(kube, kind)
    for index in (0, 1):
        run.pod(index)
    run.say(0, STEP.format(30))
    run.end(0)
    run.end(1)
    assert ObservedRun(run.cluster, run.record).status.state == "running"  # until the job is complete
    run.finish(condition)
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.exit_code, status.step, status.why_short) == ("finished", 0, 30, None)
    assert "exit code  0" in run_text(status)


def test_stateful_set_is_finished_when_all_pods_are_idle(kube: KubeServer) -> None:
    run = launch(kube, "stateful_set")
    for index in (0, 1):
        run.pod(index)
    run.say(0, STEP.format(30), IDLE.format(0))
    run.say(1, "[DDP] still saving")
    assert ObservedRun(run.cluster, run.record).status.state == "running"
    run.say(1, IDLE.format(0))
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.exit_code) == ("finished", 0)


def test_stateful_set_failed(kube: KubeServer) -> None:
    run = launch(kube, "stateful_set")
    for index in (0, 1):
        run.pod(index)
        run.say(index, IDLE.format(65 - index))
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.exit_code) == ("failed", 65)
    assert status.why_short is not None
    assert "65" in status.why_short
    assert [each.state for each in all_status(run.cluster, "team")] == ["failed"]


def test_exit_code_is_the_worst_of_all_pods(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0, ended(75))
    run.pod(1, ended(64))
    run.finish("Failed", reason="PodFailurePolicy", message="Container trainer failed with exit code 64")
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.exit_code) == ("failed", 64)
    assert status.why_short == "exit code 64 (bad usage or config)"
    assert worst_code([0, 75, 1, 65]) == 65
    assert worst_code([0, 75, 1]) == 1
    assert worst_code([0, None, 75]) == 75
    assert worst_code([None]) is None


def test_failed_out_of_memory_at_restart_limit(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0, ended(75))
    run.pod(1, ended(137, "OOMKilled"))
    run.finish("Failed", reason="BackoffLimitExceeded", message="Job has reached the specified backoff limit")
    status = ObservedRun(run.cluster, run.record).status
    assert status.exit_code == 137
    assert status.why_short is not None
    for fact in (run.pods[1], "launch.resources.memory", "restart limit"):
        assert fact in status.why_short


@pytest.mark.parametrize("code", [75, 69, 1, 64, 65, 0])
def test_exit_codes_of_pytorch_job_are_translated_back(kube: KubeServer, code: int) -> None:
    run = launch(kube, "pytorch_job")
    run.pod(0, ended(pytorchjob_code(code)))
    assert ObservedRun(run.cluster, run.record).status.pods[0].exit_code == code


def test_signal_exit_codes_of_pytorch_job_are_kept(kube: KubeServer) -> None:
    run = launch(kube, "pytorch_job")
    run.pod(0, ended(137, "OOMKilled"))
    run.pod(1, ended(143))
    assert [pod.exit_code for pod in ObservedRun(run.cluster, run.record).status.pods] == [137, 143]


def test_node_ranks_of_pytorch_workers_follow_the_master(kube: KubeServer) -> None:
    run = launch(kube, "pytorch_job", "launch.pytorch_master=true")
    master = run.pod(0, role="master")
    labels = kube.objects["pods", "team", master]["metadata"]["labels"]
    assert labels["training.kubeflow.org/replica-type"] == "master"
    kube.add(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "demo-worker-0",
                "namespace": "team",
                "labels": {**labels, "training.kubeflow.org/replica-type": "worker"},
            },
            "spec": {},
            "status": {"phase": "Pending"},
        }
    )
    assert [(pod.index, pod.name) for pod in ObservedRun(run.cluster, run.record).status.pods] == [
        (0, master),
        (1, "demo-worker-0"),
    ]


def test_replaced_pod_counts_as_restart(kube: KubeServer) -> None:
    run = launch(kube)
    old, _ = run.pod(0), run.pod(1)
    run.say(0, STEP.format(20))
    run.end(0, 1)
    status = ObservedRun(run.cluster, run.record).status
    assert status.state == "restarting"
    assert status.why_short == "code 1 (pod 0)"
    new = run.pod(0, waiting("ContainerCreating"))
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.restarts, status.pods[0].name) == ("restarting", 1, new)
    assert new != old
    assert status.pods[0].last_exit_code == 1
    run.set(0, running())
    assert ObservedRun(run.cluster, run.record).status.state == "restarting"
    run.say(0, STEP.format(21))
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.restarts, status.exit_code) == ("running", 1, None)
    assert status.why_short == "pod 0 restarted after exit code 1"


def test_container_restarted_in_place(kube: KubeServer) -> None:
    run = launch(kube, "stateful_set")
    name = run.pod(0)
    run.pod(1)
    run.say(0, STEP.format(20))
    kube.restart_log(name)
    run.set(0, waiting("CrashLoopBackOff", "back-off 10s"), restarts=1, last=ended(75))
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.restarts) == ("restarting", 1)
    assert status.why_short is not None
    assert "code 75" in status.why_short
    assert status.step == 20  # from the previous container
    run.set(0, running(), restarts=1, last=ended(75))
    run.say(0, STEP.format(21))
    assert ObservedRun(run.cluster, run.record).status.state == "running"


def test_terminating_pod(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    run.pod(1)
    run.say(0, STEP.format(20))
    run.set(1, running(), is_leaving=True)
    status = ObservedRun(run.cluster, run.record).status
    assert status.state == "restarting"
    assert status.why_short == f"{run.pods[1]} is being deleted on k8s-node1"
    assert status.pods[1].phase == "Terminating"


def test_elastic_run_is_running_with_fewer_pods(kube: KubeServer) -> None:
    run = launch(kube, "indexed_job", "launch.nodes=1:2", "trainer.grad_accum_steps=2")
    run.pod(0)
    run.pod(1, {}, conditions=UNSCHEDULABLE)
    run.say(0, STEP.format(20))
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.nodes) == ("running", 2)
    assert status.why_short is not None
    assert "unschedulable" in status.why_short


def test_suspended(kube: KubeServer) -> None:
    run = launch(kube, "indexed_job", "launch.queue=gpus")
    run.finish("Suspended")
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.why_short) == ("suspended", "queued in gpus")


def test_stopping_removed_and_stopped(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    run.event("SuccessfulCreate", "Created pod")
    kube.remove("Job", "demo")
    run.set(0, running(), is_leaving=True)
    assert ObservedRun(run.cluster, run.record).status.state == "stopping"
    kube.remove("Pod", run.pods[0])
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.exit_code) == ("removed", None)
    kube.change("ConfigMap", "demo-config", {"metadata": {"annotations": {STOPPED_AT: "2026-01-01T00:00:00Z"}}})
    assert ObservedRun(run.cluster, run.record).status.state == "stopped"


def test_interrupted_launch_is_incomplete(kube: KubeServer) -> None:
    run = launch(kube)
    kube.remove("Job", "demo")
    # Events of a run whose name has the same prefix, and of the volume: they do not prove that the job existed.
    run.event("SuccessfulCreate", "Created pod", name="demo-two")
    run.event("SuccessfulCreate", "Created pod", name="demo-two-0-abcde", kind="Pod")
    run.event("ExternalProvisioning", "waiting", name="demo-runs", kind="PersistentVolumeClaim")
    (status,) = all_status(run.cluster, "team")
    assert status.state == "incomplete"
    assert "llmtrain resume demo" in (status.why_short or "")
    kube.change("ConfigMap", "demo-config", {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}})
    assert ObservedRun(run.cluster, run.record).status.state == "removed"  # events have expired by now


def test_job_without_run_label_is_ignored(kube: KubeServer) -> None:
    run = launch(kube)
    kube.change("Job", "demo", {"metadata": {"labels": {"llmtrain.dev/run": None}}})
    assert ObservedRun(run.cluster, run.record).status.state == "incomplete"


def test_refused_pods(kube: KubeServer) -> None:
    run = launch(kube)
    run.event("FailedCreate", 'Error creating: pods "demo-0-x" is forbidden: exceeded quota: q, requested: pods=1')
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.why_short) == ("pending", "pods are refused: q, requested: pods=1")
    assert all_status(run.cluster, "team")[0].why_short == status.why_short
    kube.forbidden.add("events")
    assert ObservedRun(run.cluster, run.record).status.why_short is None


@pytest.mark.parametrize("mode", ["doctor", "command"])
def test_modes_without_steps_are_running_when_all_pods_are(kube: KubeServer, mode: str) -> None:
    task = PodTask("command", ("python", "x.py")) if mode == "command" else PodTask("doctor")
    run = launch(kube, task=task)
    run.pod(0)
    assert ObservedRun(run.cluster, run.record).status.state == "starting"
    run.pod(1)
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.mode, status.max_steps) == ("running", mode, None)


def test_resource_usage(kube: KubeServer) -> None:
    run = launch(kube)
    name = run.pod(0)
    assert ObservedRun(run.cluster, run.record).status.pods[0].cpu is None
    kube.metrics = {name: {"cpu": "250123456n", "memory": "812345Ki"}}
    status = ObservedRun(run.cluster, run.record).status
    assert (status.pods[0].cpu, status.pods[0].memory) == ("250123456n", "812345Ki")
    assert "0.25  793 MiB" in run_text(status)
    assert ObservedRun(run.cluster, run.record, with_usage=False).status.pods[0].cpu is None


def test_status_without_access_to_logs(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    run.pod(1)
    kube.forbidden.add("log")
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.step) == ("running", None)


def test_pods_without_index_are_ignored(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    labels = {"app": "llmtrain", "llmtrain.dev/run": "demo"}
    reader = {"name": "demo-reader", "namespace": "team", "labels": labels}
    kube.add({"apiVersion": "v1", "kind": "Pod", "metadata": reader, "spec": {}, "status": {"phase": "Running"}})
    assert [pod.index for pod in ObservedRun(run.cluster, run.record).status.pods] == [0]


def test_all_status_needs_few_requests(kube: KubeServer) -> None:
    for number in range(4):
        run = launch(kube, "stateful_set" if number == 3 else "indexed_job", *SIXTEEN, name=f"run-{number}")
        for index in range(16):
            run.pod(index)
        run.say(0, STEP.format(number + 1))
    launch(kube, "pytorch_job", name="gone")
    kube.missing_kinds.add("pytorchjobs")
    kube.requests.clear()
    started = time.monotonic()
    statuses = all_status(kube.cluster(), "team")
    assert time.monotonic() - started < limit(5)  # 0.1 s without load
    assert {(each.run_id, each.state, each.step) for each in statuses} == {
        ("gone", "incomplete", None),
        *((f"run-{number}", "running", number + 1) for number in range(4)),
    }
    assert kube.asked() == {
        "GET configmaps": 1,
        "GET pods": 1,
        "GET jobs": 1,
        "GET statefulsets": 1,
        "GET pytorchjobs": 1,
        "GET events": 1,
        "GET log": 4,
    }
    table = runs_table(statuses, with_namespace=True).splitlines()
    assert table[0].split()[:3] == ["namespace", "run", "state"]
    assert sum("16/16" in row for row in table) == 4


def test_child_jobs_of_a_job_set_are_ignored(kube: KubeServer) -> None:
    run = launch(kube, "job_set")
    kube.add(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "demo-node-0", "namespace": "team", "labels": run.plan.labels},
            "status": {"conditions": [{"type": "Complete", "status": "True"}]},
        }
    )
    assert [each.state for each in all_status(run.cluster, None)] == ["pending"]


def test_failed_init_container(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0, waiting("PodInitializing"))
    row = {"name": "prefetch", "state": ended(65), "restartCount": 0}
    kube.change("Pod", run.pods[0], {"status": {"initContainerStatuses": [row], "phase": "Failed"}})
    pod = ObservedRun(run.cluster, run.record).status.pods[0]
    assert (pod.phase, pod.exit_code, pod.reason) == ("Failed", 65, "Error")


def test_runs_of_a_forbidden_kind_are_unknown(kube: KubeServer) -> None:
    hidden = [launch(kube, "indexed_job", name=name) for name in ("one", "two")]
    readable = launch(kube, "stateful_set", name="three")
    for run in (*hidden, readable):
        run.pod(0)
        run.pod(1)
        run.say(0, STEP.format(5))
    kube.forbidden = {"jobs"}
    statuses = {status.run_id: status for status in all_status(readable.cluster, "team")}
    assert {name: status.state for name, status in statuses.items()} == {
        "one": "unknown",
        "two": "unknown",
        "three": "running",
    }
    assert "list jobs" in str(statuses["one"].why_short)
    assert (statuses["three"].why_short, statuses["three"].step) == (None, 5)
    assert not statuses["one"].has_ended
    assert [pod.phase for pod in statuses["one"].pods] == ["Running", "Running"]
    assert "list jobs" in runs_table(list(statuses.values()), with_namespace=False)


def set_deletion(kube: KubeServer, pod: str, seconds: float) -> None:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))
    kube.change("Pod", pod, {"metadata": {"deletionTimestamp": at}})


@pytest.mark.parametrize(("ended_as", "state"), [(None, "stopped"), ("failed", "failed")])
def test_overdue_pods_do_not_delay_the_final_state(kube: KubeServer, ended_as: str | None, state: str) -> None:
    run = launch(kube)
    for index in (0, 1):
        run.pod(index)
    notes = {STOPPED_AT: "2026-01-01T00:00:00Z"} | ({ENDED_AS: ended_as} if ended_as else {})
    kube.change("ConfigMap", "demo-config", {"metadata": {"annotations": notes}})
    kube.remove("Job", "demo")
    for seconds, expected in ((600, "stopping"), (-5, "stopping"), (-3600, state)):
        for index in (0, 1):
            set_deletion(kube, run.pods[index], seconds)
        assert ObservedRun(run.cluster, run.record).status.state == expected
        assert [status.state for status in all_status(run.cluster, "team")] == [expected]
    set_deletion(kube, run.pods[1], 600)
    assert ObservedRun(run.cluster, run.record).status.state == "stopping", "one pod is still saving"


def test_old_run_with_only_overdue_pods_is_removed(kube: KubeServer) -> None:
    run = launch(kube)
    set_deletion(kube, run.pod(0), -3600)
    kube.remove("Job", "demo")
    kube.change("ConfigMap", "demo-config", {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}})
    assert ObservedRun(run.cluster, run.record).status.state == "removed"


def test_recent_run_with_only_overdue_pods_is_removed(kube: KubeServer) -> None:
    """Pods prove that the job existed, so the launch was not interrupted."""
    run = launch(kube)
    run.event("SuccessfulCreate", "Created pod")
    set_deletion(kube, run.pod(0), -3600)
    kube.remove("Job", "demo")
    assert ObservedRun(run.cluster, run.record).status.state == "removed"


@pytest.mark.parametrize("sidecar", [ended(3), ended(137), waiting("CrashLoopBackOff")])
def test_exit_of_a_native_sidecar_is_not_that_of_the_trainer(kube: KubeServer, sidecar: Object) -> None:
    """An init container that is restarted runs beside the trainer, and is killed after it."""
    run = launch(kube)
    row = {"name": "proxy", "state": sidecar, "restartCount": 2}
    for index in (0, 1):
        run.pod(index)
        kube.change("Pod", run.pods[index], {"status": {"initContainerStatuses": [row]}})
    status = ObservedRun(run.cluster, run.record).status
    assert (status.state, status.restarts, [pod.exit_code for pod in status.pods]) == ("starting", 0, [None, None])
    for index in (0, 1):
        run.end(index, 65)
    assert [pod.exit_code for pod in ObservedRun(run.cluster, run.record).status.pods] == [65, 65]


def test_failed_init_container_counts_until_the_trainer_has_started(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0, waiting("PodInitializing"))
    row = {"name": "prefetch", "state": ended(64), "restartCount": 0}
    kube.change("Pod", run.pods[0], {"status": {"initContainerStatuses": [row]}})
    assert ObservedRun(run.cluster, run.record).status.pods[0].exit_code == 64
