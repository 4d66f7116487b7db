"""Launches that will not start: one message each, and none where it may still come right."""

import pytest
from kube_runs import STEP, FakeRun, ended, launch, running, waiting

from kube_server import KubeServer
from llmtrain.errors import UsageError
from llmtrain.operate.status.run_status import run_status
from llmtrain.operate.status.startup_failures import never_started

PULLED = 'Back-off pulling image "me/train:1": ErrImagePull: failed to pull "docker.io/me/train:1": not found'
QUOTA = (
    'Error creating: pods "demo-0-x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2'
)


def trouble(run: FakeRun) -> UsageError | None:
    return never_started(run.cluster, run.record, run_status(run.cluster, run.record))


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"])
def test_an_image_that_cannot_be_pulled(kube: KubeServer, reason: str) -> None:
    run = launch(kube)
    run.pod(0, waiting("ContainerCreating"))
    run.pod(1, waiting(reason, PULLED))
    error = trouble(run)
    assert error is not None
    assert error.what == (
        f"The image me/train:1 cannot be pulled for {run.pods[1]} on machine-1: "
        'failed to pull "docker.io/me/train:1": not found'
    )
    assert error.remedy is not None
    assert ("image_pull_policy" in error.remedy) == (reason == "ErrImageNeverPull")
    assert error.exit_code == 64


def test_a_private_registry(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(1, waiting("ContainerCreating"))
    run.pod(0, waiting("ErrImagePull", "pull access denied, repository does not exist or may require authorization"))
    error = trouble(run)
    assert error is not None
    assert error.remedy == "Is the name right? A private registry needs launch.image_pull_secrets."


def test_of_an_init_container_too(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(1, waiting("ContainerCreating"))
    run.pod(0, waiting("PodInitializing"))
    row = {"name": "prefetch", "state": waiting("ImagePullBackOff", PULLED), "restartCount": 0}
    kube.change("Pod", run.pods[0], {"status": {"initContainerStatuses": [row]}})
    assert trouble(run) is not None


def test_a_secret_that_is_not_there(kube: KubeServer) -> None:
    run = launch(kube, "indexed_job", "launch.hf_token_secret.name=hf")
    run.pod(1, waiting("ContainerCreating"))
    run.pod(0, waiting("CreateContainerConfigError", 'secret "hf" not found'))
    error = trouble(run)
    assert error is not None
    assert 'secret "hf" not found' in error.what
    assert error.remedy is not None
    assert "llmtrain secret hf-token" in error.remedy


@pytest.mark.parametrize("kind", ["indexed_job", "stateful_set", "pytorch_job", "job_set", "train_job"])
def test_a_quota(kube: KubeServer, kind: str) -> None:
    run = launch(kube, kind)
    assert trouble(run) is None
    inner = kind in ("job_set", "train_job")
    reason = "FailedCreatePod" if kind == "pytorch_job" else "FailedCreate"
    run.event(reason, QUOTA, *(("Job", "demo-node-0") if inner else ()))
    error = trouble(run)
    assert error is not None
    for fact in ("namespace team", "run demo", "q, requested: pods=1, used: pods=2, limited: pods=2"):
        assert fact in error.what
    assert error.remedy is not None
    assert "launch.resources" in error.remedy


def test_rules_of_the_namespace(kube: KubeServer) -> None:
    run = launch(kube, "pytorch_job", "launch.pytorch_master=true")
    run.event("FailedCreatePod", 'pods "demo-worker-0" is forbidden: violates PodSecurity "restricted:latest": x')
    error = trouble(run)
    assert error is not None
    assert "violates PodSecurity" in error.what
    assert error.remedy is not None
    assert "launch.pytorch_master" in error.remedy


@pytest.mark.parametrize("security", ["baseline", "none"])
def test_rules_of_the_namespace_that_ask_for_more(kube: KubeServer, security: str) -> None:
    run = launch(kube, "indexed_job", f"launch.security={security}")
    run.event("FailedCreate", 'pods "demo-0-x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot')
    error = trouble(run)
    assert error is not None
    assert error.exit_code == 64
    assert f"launch.security: {security}" in (error.remedy or "")


def test_refusals_of_others_and_of_earlier_are_not_ours(kube: KubeServer) -> None:
    run = launch(kube)
    run.event("FailedCreate", QUOTA, name="demo-two")
    run.event("FailedScheduling", "0/2 nodes", "Pod", "demo-0-abcde")
    assert trouble(run) is None
    run.event("FailedCreate", QUOTA)
    kube.change("Job", "demo", {"metadata": {"creationTimestamp": "2099-01-01T00:00:00Z"}})
    assert trouble(run) is None


def test_pods_that_ran_or_may_run_are_no_trouble(kube: KubeServer) -> None:
    run = launch(kube)
    no_room = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2"}]
    run.pod(0, {}, conditions=no_room)
    run.pod(1, waiting("ContainerCreating"))
    assert trouble(run) is None
    run.set(1, waiting("ImagePullBackOff", PULLED))
    assert trouble(run) is not None
    run.set(0, running())
    assert trouble(run) is None
    run.end(0, 1)
    assert trouble(run) is None


def test_a_quota_for_some_of_the_pods(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    run.event("FailedCreate", QUOTA)
    assert trouble(run) is not None, "the one that runs waits for the other"
    elastic = launch(kube, "indexed_job", "launch.nodes=1:2", name="elastic")
    elastic.pod(0)
    elastic.event("FailedCreate", QUOTA)
    assert trouble(elastic) is None, "one is enough"
    run.say(0, STEP.format(1))
    assert trouble(run) is None, "what has trained is not taken back"


def test_a_run_that_has_ended_is_no_trouble(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0, ended(64))
    run.finish("Failed")
    assert trouble(run) is None
