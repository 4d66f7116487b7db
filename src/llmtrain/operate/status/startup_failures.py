"""Launches that will not start by themselves: what is wrong, and what to do, in one message."""

from llmtrain.errors import UsageError
from llmtrain.kubernetes.api_errors import admission_error, one_line
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch.record import Record
from llmtrain.operate.status.events import find_events, refusal
from llmtrain.operate.status.pods import PodStatus
from llmtrain.operate.status.run_status import RunStatus, find_job
from llmtrain.operate.status.state import message_text

IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
CONFIG_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


def never_started(cluster: Cluster, record: Record, status: RunStatus) -> UsageError | None:
    """The error, where no pod has ever run and it is clear why. A pod that no machine has room for is none: a machine
    may come. Where pods are refused, those that were let in wait for them in vain: that counts as not started too."""
    if status.state not in ("pending", "starting") or status.step is not None:
        return None
    if len(status.pods) < record.config.launch.node_range[0]:
        return _refused(cluster, record)
    for pod in status.pods if not any(pod.has_run for pod in status.pods) else ():
        if pod.reason in IMAGE_REASONS:
            return image_error(record, pod)
        if pod.reason in CONFIG_REASONS:
            return config_error(record, pod, cluster.place(record.namespace))
    return None


def image_error(record: Record, pod: PodStatus) -> UsageError:
    launch = record.config.launch
    said = pod.message or pod.reason or ""
    if pod.reason == "ErrImageNeverPull":
        remedy = f"launch.image_pull_policy is {launch.image_pull_policy}: load the image into every machine first."
    elif any(word in said.lower() for word in ("unauthorized", "authorization", "denied", "forbidden", "401", "403")):
        remedy = "Is the name right? A private registry needs launch.image_pull_secrets."
    else:
        remedy = "Name one that the cluster can pull with --image; a private registry needs launch.image_pull_secrets."
    error = UsageError(
        f"The image {launch.image} cannot be pulled for {pod.name}{f' on {pod.node}' if pod.node else ''}: "
        f"{message_text(pod)}",
        remedy=remedy,
    )
    error.details["reason"] = pod.reason
    return error


def config_error(record: Record, pod: PodStatus, place: str) -> UsageError:
    said = pod.message or pod.reason or ""
    remedy = "Make it, or correct the launch section, then launch again."
    secret = record.config.launch.hf_token_secret.name
    if "secret" in said and secret and secret in said:
        remedy = f"Make it: llmtrain secret hf-token --from-env-file .env{place}. Or correct launch.hf_token_secret."
    error = UsageError(f"The container of {pod.name} cannot be made: {one_line(said)}", remedy=remedy)
    error.details["reason"] = pod.reason
    return error


def _refused(cluster: Cluster, record: Record) -> UsageError | None:
    job = find_job(cluster, record)
    if job is None:
        return None
    said = refusal(record, job, find_events(cluster, record.namespace, only_warnings=True))
    if said is None:
        return None
    pods = f"pods of run {record.run_id}"
    error = admission_error(pods, record.namespace, said, record.config.launch) or UsageError(
        f"The cluster refuses to create {pods}: {one_line(said)}",
        remedy="Correct the launch section, then launch again.",
    )
    error.details["reason"] = "FailedCreate"
    return error
