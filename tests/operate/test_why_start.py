"""llmtrain why: pods that are not created, do not start, or were disrupted."""

import pytest
from kube_runs import STEP, ended, launch, running, waiting
from why_runs import CRASH, GONE, KINDS, NO_GPU, PULL, QUOTA, SECURITY, at, end, lose, shown, unschedulable_pod, why

from kube_server import KubeServer


@pytest.mark.parametrize("kind", KINDS)
def test_image_pull_on_one_of_two_pods(kube: KubeServer, kind: str) -> None:
    run = launch(kube, kind)
    run.pod(0)
    run.say(0, "[DDP] still waiting for 1 of 2 processes: rank 1")
    run.pod(1, waiting("ImagePullBackOff", PULL))
    found = why(run)
    assert found.cause == "image_pull"
    assert "me/train:1: not found" in found.what
    assert "1 of 2 pods are affected." in found.evidence
    assert "--image" in found.remedy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("message", ['secret "hf" not found', "couldn't find key token in Secret team/hf"])
def test_missing_secret_or_key(kube: KubeServer, kind: str, message: str) -> None:
    run = launch(kube, kind, "launch.hf_token_secret.name=hf")
    run.pod(0, waiting("CreateContainerConfigError", message))
    run.pod(1, waiting("ContainerCreating"))
    found = why(run)
    assert found.cause == "container_config"
    assert message in found.what
    assert "launch" in found.remedy


def test_missing_config_map(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0, waiting("ContainerCreating"))
    run.pod(1, waiting("ContainerCreating"))
    message = 'MountVolume.SetUp failed for volume "config" : configmap "demo-config" not found'
    run.event("FailedMount", message, "Pod", run.pods[0])
    found = why(run)
    assert (found.cause, message in found.what) == ("container_config", True)
    run.set(0, running())
    run.set(1, running())
    assert why(run).cause == "starting", "the event is older than the start"


def test_missing_claim(kube: KubeServer) -> None:
    run = launch(kube, "indexed_job", "launch.data_volume.claim=texts")
    for index in (0, 1):
        unschedulable_pod(run, index, '0/3 nodes are available: persistentvolumeclaim "texts" not found. not found.')
    found = why(run)
    assert (found.cause, "texts" in found.what) == ("claim", True)
    assert "launch.data_volume.claim" in found.remedy
    assert "Claim texts: missing." in found.evidence


def test_unbound_claim(kube: KubeServer) -> None:
    run = launch(kube)
    kube.change("PersistentVolumeClaim", "demo-runs", {"status": {"phase": "Pending"}})
    for index in (0, 1):
        unschedulable_pod(
            run, index, "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: 0/3"
        )
    run.event("ProvisioningFailed", 'storageclass.storage.k8s.io "x" not found', "PersistentVolumeClaim", "demo-runs")
    found = why(run)
    assert (found.cause, "demo-runs" in found.what) == ("claim", True)
    assert 'storageclass.storage.k8s.io "x" not found' in shown(found)
    assert "launch.runs_volume.storage_class" in found.remedy
    assert "llmtrain delete demo" in found.remedy, "a launch does not change an existing claim"
    assert "launch.runs_volume.claim=NAME" in found.remedy


def test_volume_that_cannot_be_mounted(kube: KubeServer) -> None:
    run = launch(kube)
    kube.change("PersistentVolumeClaim", "demo-runs", {"status": {"phase": "Bound"}})
    run.pod(0)
    run.pod(1, waiting("ContainerCreating"))
    message = 'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) demo-0'
    run.event("FailedAttachVolume", message, "Pod", run.pods[1])
    found = why(run)
    assert (found.cause, message in found.what) == ("claim", True)


@pytest.mark.parametrize("kind", KINDS)
def test_unschedulable_names_resources_and_taints(kube: KubeServer, kind: str) -> None:
    run = launch(kube, kind, "launch.resources.gpus=1")
    run.pod(0)
    unschedulable_pod(run, 1, NO_GPU)
    found = why(run)
    assert found.cause == "unschedulable"
    assert found.what == (
        "1 of 2 pods cannot be scheduled. Insufficient nvidia.com/gpu (each pod requests 1) on 2 of 3 nodes. 1 node(s) "
        "had untolerated taint {node-role.kubernetes.io/control-plane: }."
    )
    assert "launch.resources.gpus, launch.processes_per_node, launch.nodes, launch.tolerations" in found.remedy
    assert "1 of 2 pods are scheduled." in found.evidence


def test_one_of_65_pods_is_unschedulable(kube: KubeServer) -> None:
    sets = ("launch.nodes=65", "launch.resources.gpus=8", "launch.processes_per_node=8", "trainer.grad_accum_steps=520")
    run = launch(kube, "indexed_job", *sets, "distributed.reproducible_reduce=false")
    for index in range(64):
        run.pod(index)
    unschedulable_pod(run, 64, "0/64 nodes are available: 64 Insufficient nvidia.com/gpu.")
    found = why(run)
    assert found.what.startswith(
        "1 of 65 pods cannot be scheduled. Insufficient nvidia.com/gpu (each pod requests 8) on 64 of 64"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("message", "cause", "word"), [
    (QUOTA, "quota_exceeded", "compute, requested: requests.cpu=2"),
    (SECURITY, "admission_refused", "violates PodSecurity"),
    ('admission webhook "policy.example" denied the request: no owner label', "admission_refused", "no owner label"),
])  # fmt: skip
def test_refused_pods(kube: KubeServer, kind: str, message: str, cause: str, word: str) -> None:
    run = launch(kube, kind)
    run.pod(0)
    inner = kind in ("job_set", "train_job")
    reason = "FailedCreatePod" if kind == "pytorch_job" else "FailedCreate"
    run.event(reason, message, *(("Job", "demo-node-0") if inner else ()))
    found = why(run)
    assert found.cause == cause
    assert word in found.what
    assert "1 of 2 pods exist." in found.evidence


def test_pod_security_refusal_names_the_field(kube: KubeServer) -> None:
    run = launch(kube, "indexed_job", "launch.security=baseline")
    run.event("FailedCreate", SECURITY)
    found = why(run)
    assert found.cause == "admission_refused"
    assert "launch.security: baseline" in found.remedy


def test_refusal_before_the_last_created_pod_is_ignored(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    run.event("FailedCreate", QUOTA)
    assert why(run).cause == "quota_exceeded"
    run.event("SuccessfulCreate", "Created pod: demo-1-abcde")
    kube.change("Event", f"event-{run.made}", {"lastTimestamp": "2099-01-01T00:00:00Z"})
    assert why(run).cause == "starting"


# Lost nodes and disruptions.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sign", ["overdue", "terminating", "not ready", "unknown"])
def test_lost_node(kube: KubeServer, kind: str, sign: str) -> None:
    run = launch(kube, kind)
    run.pod(0)
    run.pod(1)
    run.say(0, STEP.format(5))
    lose(run, 1, sign)
    found = why(run)
    assert found.cause == "node_lost", found
    assert found.what.startswith("k8s-node1 is NotReady: 1 pod of 2")
    assert "llmtrain recover demo" in found.remedy
    end(run, 0, 75, *GONE)
    assert why(run).cause == "node_lost", "the restart of the other pod follows from it"


def test_pod_that_is_not_ready_is_not_on_a_lost_node(kube: KubeServer) -> None:
    run = launch(kube)
    not_ready = [{"type": kind, "status": "False"} for kind in ("Ready", "ContainersReady")]
    run.pod(0, waiting("ContainerCreating"), conditions=not_ready)
    run.pod(1, running(), conditions=not_ready)
    assert why(run).cause == "starting"


@pytest.mark.parametrize(("reason", "cause"), [
    ("PreemptionByScheduler", "preempted"),
    ("EvictionByEvictionAPI", "evicted"),
    ("TerminationByKubelet", "evicted"),
    ("DeletionByTaintManager", "evicted"),
])  # fmt: skip
def test_disruption_target(kube: KubeServer, reason: str, cause: str) -> None:
    run = launch(kube)
    end(run, 0, 75, "stopped: Stopped at step 5 as told.")
    run.pod(1)
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "from the cluster"}
    run.set(1, at(ended(75)), conditions=[condition])
    found = why(run)
    assert (found.cause, "from the cluster" in found.what) == (cause, True)


def test_evicted_by_the_kubelet(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    run.pod(1, ended(137))
    message = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 80Mi."
    kube.change("Pod", run.pods[1], {"status": {"reason": "Evicted", "message": message}})
    found = why(run)
    assert (found.cause, message in found.what, "launch.resources" in found.remedy) == ("evicted", True, True)


def test_preempted_pod_that_was_deleted(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    run.event("Preempted", "Preempted by pod 7c1e on node k8s-node1", "Pod", "demo-1-abcde")
    assert why(run).cause == "preempted"
    end(run, 0, 75, "stopped: Stopped at step 5 as told.")
    assert why(run).cause == "preempted"
    end(run, 0, 1, *CRASH)
    assert why(run).cause == "crash", "it is the newer cause"


def test_terminating_pod_is_interrupted_or_evicted(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    run.say(0, STEP.format(5))
    run.pod(1, running(), is_leaving=True)
    found = why(run)
    assert (found.cause, run.pods[1] in found.what) == ("interrupted", True)
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "EvictionByEvictionAPI",
        "message": "Eviction API",
    }
    run.set(1, running(), is_leaving=True, conditions=[condition])
    assert why(run).cause == "evicted"


def test_mount_failure_is_over_when_the_image_is_pulled(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0, waiting("ContainerCreating"))
    run.pod(1, waiting("ContainerCreating"))
    message = 'MountVolume.SetUp failed for volume "{}" : {}'
    run.event("FailedMount", message.format("config", "failed to sync configmap cache: timed out"), "Pod", run.pods[0])
    assert why(run).cause == "starting"
    run.event("FailedMount", message.format("pvc-1", "rpc error: mount failed: exit status 32"), "Pod", run.pods[0])
    assert why(run).cause == "claim"
    run.event("Pulling", 'Pulling image "me/train:1"', "Pod", run.pods[0])
    assert why(run).cause == "pulling_image"
