"""Launches that cannot start: the error with its remedy."""

from llmtrain.core.redact import redacted_line
from llmtrain.errors import UsageError
from llmtrain.kubernetes.api_errors import admission_error
from llmtrain.launch.record import Record
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.events import failed_mount, find_events, refusal
from llmtrain.operate.status.pods import PodStatus
from llmtrain.operate.status.run_status import RunStatus
from llmtrain.operate.status.state import message_text
from llmtrain.runs.state import RunState

IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
CONFIG_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
# In messages of registries; only then is a pull secret the likely remedy.
_ACCESS_DENIED = ("unauthorized", "authorization", "denied", "forbidden", "401", "403")


def never_started(run: ObservedRun) -> UsageError | None:
    """The error if no pod has ever run and the reason is permanent. An unschedulable pod is not an error: a node may
    become free. If some pods are refused, the others wait for them, so the run counts as not started."""
    status = run.status
    if status.state not in (RunState.PENDING, RunState.STARTING) or status.step is not None:
        return None
    if len(status.pods) < run.record.config.launch.node_range[0]:
        return _refused_pods(run)
    if not any(pod.has_run for pod in status.pods):  # else the image and the config are good
        for pod in status.pods:
            if pod.reason in IMAGE_REASONS:
                return image_error(run.record, pod)
            if pod.reason in CONFIG_REASONS:
                return config_error(run.record, pod, run.place)
    return _missing_mount(run, status)


def _missing_mount(run: ObservedRun, status: RunStatus) -> UsageError | None:
    """A Secret or ConfigMap that a pod mounts and that does not exist, which is reported in events only."""
    mounting = {pod.name for pod in status.pods if pod.is_mounting}
    if not mounting:
        return None
    message = failed_mount(run.record, mounting, find_events(run.cluster, run.namespace, only_warnings=True))
    if message is None:
        return None
    error = UsageError(
        f"Cannot mount a volume of run {run.run_id}: {redacted_line(message)}",
        remedy="Create it or correct the launch section, then launch again.",
    )
    error.details["reason"] = "FailedMount"
    return error


def image_error(record: Record, pod: PodStatus) -> UsageError:
    launch = record.config.launch
    message = pod.message or pod.reason or ""
    if pod.reason == "ErrImageNeverPull":
        remedy = f"Load the image into every node first: launch.image_pull_policy is {launch.image_pull_policy}."
    elif any(word in message.lower() for word in _ACCESS_DENIED):
        remedy = "Check the image name. A private registry needs launch.image_pull_secrets."
    else:
        remedy = "Pass an image the cluster can pull with --image. A private registry needs launch.image_pull_secrets."
    on_node = f" on {pod.node}" if pod.node else ""
    error = UsageError(f"Cannot pull image {launch.image} for {pod.name}{on_node}: {message_text(pod)}", remedy=remedy)
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


def _refused_pods(run: ObservedRun) -> UsageError | None:
    if run.job is None:
        return None
    message = refusal(run.record, run.job, find_events(run.cluster, run.namespace, only_warnings=True))
    if message is None:
        return None
    return refusal_error(run.record, message)


def refusal_error(record: Record, message: str) -> UsageError:
    """The error for pods that the API server refuses to create; `message` is that of the FailedCreate event."""
    pods = f"pods of run {record.run_id}"
    error = admission_error(pods, record.namespace, message, record.config.launch)
    if error is None:
        error = UsageError(
            f"The cluster refuses to create {pods}: {redacted_line(message)}",
            remedy="Correct the launch section, then launch again.",
        )
    error.details["reason"] = "FailedCreate"
    return error
