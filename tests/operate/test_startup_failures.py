"""never_started: an error for launches that cannot start, and none for those that still may."""

import pytest
from kube_runs import STEP, FakeRun, ended, launch, running, waiting

from kube_server import KubeServer
from llmtrain.errors import UsageError
from llmtrain.kubernetes.api_errors import quota_remedy
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.startup_failures import never_started

PULLED = 'Back-off pulling image "me/train:1": ErrImagePull: failed to pull "docker.io/me/train:1": not found'
QUOTA = (
    'Error creating: pods "demo-0-x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2'
)


def start_error(run: FakeRun) -> UsageError | None:
    return never_started(ObservedRun(run.cluster, run.record))


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"])
def test_image_pull_failure(kube: KubeServer, reason: str) -> None:
    run = launch(kube)
    run.pod(0, waiting("ContainerCreating"))
    run.pod(1, waiting(reason, PULLED))
    error = start_error(run)
    assert error is not None
    for fact in ("me/train:1", run.pods[1], "k8s-node1"):
        assert fact in error.what
    assert error.what.endswith(': failed to pull "docker.io/me/train:1": not found')
    assert error.details["reason"] == reason
    assert error.remedy is not None
    assert ("image_pull_policy" in error.remedy) == (reason == "ErrImageNeverPull")
    assert error.exit_code == 64


def test_image_pull_denied_suggests_pull_secrets(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(1, waiting("ContainerCreating"))
    run.pod(0, waiting("ErrImagePull", "pull access denied, repository does not exist or may require authorization"))
    error = start_error(run)
    assert error is not None
    assert "launch.image_pull_secrets" in (error.remedy or "")
    assert "--image" not in (error.remedy or "")


def test_image_pull_failure_of_init_container(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(1, waiting("ContainerCreating"))
    run.pod(0, waiting("PodInitializing"))
    row = {"name": "prefetch", "state": waiting("ImagePullBackOff", PULLED), "restartCount": 0}
    kube.change("Pod", run.pods[0], {"status": {"initContainerStatuses": [row]}})
    assert start_error(run) is not None


def test_missing_secret_names_the_command_that_creates_it(kube: KubeServer) -> None:
    run = launch(kube, "indexed_job", "launch.hf_token_secret.name=hf")
    run.pod(1, waiting("ContainerCreating"))
    run.pod(0, waiting("CreateContainerConfigError", 'secret "hf" not found'))
    error = start_error(run)
    assert error is not None
    assert 'secret "hf" not found' in error.what
    assert error.remedy is not None
    assert "llmtrain secret hf-token" in error.remedy


def test_missing_secret_that_is_mounted(kube: KubeServer) -> None:
    """Only events tell why such a pod waits."""
    run = launch(kube)
    for index in (0, 1):
        run.pod(index, waiting("ContainerCreating"))
    run.event("FailedMount", "failed to sync configmap cache: timed out", "Pod", run.pods[0])
    assert start_error(run) is None
    message = 'MountVolume.SetUp failed for volume "x" : secret "mine" not found'
    run.event("FailedMount", message, "Pod", run.pods[1])
    error = start_error(run)
    assert error is not None
    assert message in error.what
    assert (error.exit_code, error.details["reason"]) == (64, "FailedMount")
    assert message in str(ObservedRun(run.cluster, run.record).status.why_short)
    run.set(1, running())
    assert start_error(run) is None


@pytest.mark.parametrize(
    ("requested", "word"),
    [
        ("pods=1", "launch.nodes"),
        ("requests.storage=10Gi", "launch.runs_volume.claim"),
        ("count/jobs.batch=1", "Delete"),
    ],
)
def test_remedy_of_a_quota_is_about_its_resource(requested: str, word: str) -> None:
    message = f"exceeded quota: q, requested: {requested}, used: pods=2, limited: pods=2"
    assert word in quota_remedy(message)
    assert ("launch.nodes" in quota_remedy(message)) == (word == "launch.nodes")


@pytest.mark.parametrize("kind", ["indexed_job", "stateful_set", "pytorch_job", "job_set", "train_job"])
def test_exceeded_quota(kube: KubeServer, kind: str) -> None:
    run = launch(kube, kind)
    assert start_error(run) is None
    inner = kind in ("job_set", "train_job")
    reason = "FailedCreatePod" if kind == "pytorch_job" else "FailedCreate"
    run.event(reason, QUOTA, *(("Job", "demo-node-0") if inner else ()))
    error = start_error(run)
    assert error is not None
    for fact in ("namespace team", "run demo", "q, requested: pods=1, used: pods=2, limited: pods=2"):
        assert fact in error.what
    assert error.details["reason"] == "FailedCreate"
    assert error.remedy is not None
    assert "launch.resources" in error.remedy


def test_pod_security_violation_by_pytorch_master(kube: KubeServer) -> None:
    run = launch(kube, "pytorch_job", "launch.pytorch_master=true")
    run.event("FailedCreatePod", 'pods "demo-worker-0" is forbidden: violates PodSecurity "restricted:latest": x')
    error = start_error(run)
    assert error is not None
    assert "violates PodSecurity" in error.what
    assert error.remedy is not None
    assert "launch.pytorch_master" in error.remedy


@pytest.mark.parametrize(
    ("violation", "word"),
    [
        ('host namespaces (hostNetwork=true), hostPort (container "trainer" uses hostPort 1)', "launch.host_network"),
        ('allowPrivilegeEscalation != false (container "log" must set it)', "container log of launch.pod_patch"),
        ('hostPath volumes (volume "x")', "launch.extra_volumes"),
    ],
)
def test_remedy_of_a_pod_security_violation_is_about_its_cause(kube: KubeServer, violation: str, word: str) -> None:
    run = launch(kube)
    run.event("FailedCreate", f'pods "demo-0" is forbidden: violates PodSecurity "restricted:latest": {violation}')
    error = start_error(run)
    assert error is not None
    assert word in str(error.remedy)


@pytest.mark.parametrize("security", ["baseline", "none"])
def test_pod_security_violation_names_launch_security(kube: KubeServer, security: str) -> None:
    run = launch(kube, "indexed_job", f"launch.security={security}")
    run.event("FailedCreate", 'pods "demo-0-x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot')
    error = start_error(run)
    assert error is not None
    assert error.exit_code == 64
    assert f"launch.security: {security}" in (error.remedy or "")


def test_events_of_other_runs_and_earlier_jobs_are_ignored(kube: KubeServer) -> None:
    run = launch(kube)
    run.event("FailedCreate", QUOTA, name="demo-two")
    run.event("FailedScheduling", "0/2 nodes", "Pod", "demo-0-abcde")
    assert start_error(run) is None
    run.event("FailedCreate", QUOTA)
    kube.change("Job", "demo", {"metadata": {"creationTimestamp": "2099-01-01T00:00:00Z"}})
    assert start_error(run) is None


def test_no_error_for_unschedulable_or_started_pods(kube: KubeServer) -> None:
    run = launch(kube)
    unschedulable = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2"}]
    run.pod(0, {}, conditions=unschedulable)
    run.pod(1, waiting("ContainerCreating"))
    assert start_error(run) is None
    run.set(1, waiting("ImagePullBackOff", PULLED))
    assert start_error(run) is not None
    run.set(0, running())
    assert start_error(run) is None
    run.end(0, 1)
    assert start_error(run) is None


def test_quota_that_allows_some_pods(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    run.event("FailedCreate", QUOTA)
    assert start_error(run) is not None, "the running pod waits for the other"
    elastic = launch(kube, "indexed_job", "launch.nodes=1:2", name="elastic")
    elastic.pod(0)
    elastic.event("FailedCreate", QUOTA)
    assert start_error(elastic) is None, "one pod is enough"
    run.say(0, STEP.format(1))
    assert start_error(run) is None, "a run that has trained is not rolled back"


def test_no_error_for_ended_run(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0, ended(64))
    run.finish("Failed")
    assert start_error(run) is None
