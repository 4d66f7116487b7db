"""Launches that cannot start: the error with its remedy."""

from llmtrain.errors import UsageError
from llmtrain.kubernetes.api_errors import admission_error
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch.record import Record
from llmtrain.operate.status.events import find_events, refusal
from llmtrain.operate.status.pods import PodStatus
from llmtrain.operate.status.run_status import RunStatus, find_job
from llmtrain.operate.status.state import message_text
from llmtrain.redact import redacted_line

IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
CONFIG_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_ACCESS_DENIED = ("unauthorized", "authorization", "denied", "forbidden", "401", "403")


def never_started(cluster: Cluster, record: Record, status: RunStatus) -> UsageError | None:
    """The error if no pod has ever run and the reason is permanent. An unschedulable pod is not an error: a node may
    become free. If some pods are refused, the others wait for them, so the run counts as not started."""
    if status.state not in ("pending", "starting") or status.step is not None:
        return None
    if len(status.pods) < record.config.launch.node_range[0]:
        return _refused_pods(cluster, record)
    for pod in status.pods if not any(pod.has_run for pod in status.pods) else ():
        if pod.reason in IMAGE_REASONS:
            return image_error(record, pod)
        if pod.reason in CONFIG_REASONS:
            return config_error(record, pod, cluster.place(record.namespace))
    return None


def image_error(record: Record, pod: PodStatus) -> UsageError:
    launch = record.config.launch
    message = pod.message or pod.reason or ""
    if pod.reason == "ErrImageNeverPull":
        remedy = f"Load the image into every node first: launch.image_pull_policy is {launch.image_pull_policy}."
    elif any(word in message.lower() for word in _ACCESS_DENIED):
        remedy = "Check the image name. A private registry needs launch.image_pull_secrets."
    else:
        remedy = "Pass an image the cluster can pull with --image. A private registry needs launch.image_pull_secrets."
    error = UsageError(
        f"Cannot pull image {launch.image} for {pod.name}{f' on {pod.node}' if pod.node else ''}: {message_text(pod)}",
        remedy=remedy,
    )
    error.details["reason"] = pod.reason
    return error


def config_error(record: Record, pod: PodStatus, place: str) -> UsageError:
    message = pod.message or pod.reason or ""
    remedy = "Create it or correct the launch section, then launch again."
    secret = record.config.launch.hf_token_secret.name
    if "secret" in message and secret and secret in message:
        remedy = f"Create it: llmtrain secret hf-token --from-env-file .env{place}. Or correct launch.hf_token_secret."
    error = UsageError(f"Cannot create the container of {pod.name}: {redacted_line(message)}", remedy=remedy)
    error.details["reason"] = pod.reason
    return error


def _refused_pods(cluster: Cluster, record: Record) -> UsageError | None:
    job = find_job(cluster, record)
    if job is None:
        return None
    message = refusal(record, job, find_events(cluster, record.namespace, only_warnings=True))
    return None if message is None else refusal_error(record, message)


def refusal_error(record: Record, message: str) -> UsageError:
    """The error for pods that the API server refuses to create; `message` is that of the FailedCreate event."""
    pods = f"pods of run {record.run_id}"
    error = admission_error(pods, record.namespace, message, record.config.launch) or UsageError(
        f"The cluster refuses to create {pods}: {redacted_line(message)}",
        remedy="Correct the launch section, then launch again.",
    )
    error.details["reason"] = "FailedCreate"
    return error
