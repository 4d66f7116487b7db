"""The pods of a run: node rank, phase and reason of each."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from llmtrain.distributed.exit_codes import FINAL_CODES, from_pytorchjob_code
from llmtrain.distributed.worker_exit import severity
from llmtrain.kubernetes.client import Object
from llmtrain.launch.objects import is_overdue
from llmtrain.launch.record import Record
from llmtrain.operate.status.lost_nodes import lost_pod
from llmtrain.redact import redacted_line

INDEX_LABELS = (
    "batch.kubernetes.io/job-completion-index",
    "apps.kubernetes.io/pod-index",
    "training.kubeflow.org/replica-index",
)
ROLE_LABEL = "training.kubeflow.org/replica-type"
_STARTING_REASONS = ("ContainerCreating", "PodInitializing")


@dataclass(frozen=True)
class PodStatus:
    name: str
    index: int
    """Its node rank."""
    ranks: str
    """Ranks of its processes, such as `4-7`."""
    phase: str
    """Pending, Running, Succeeded, Failed, Unknown or Terminating."""
    reason: str | None
    """Why it is not running, as Kubernetes names it: ImagePullBackOff, Unschedulable, OOMKilled, ..."""
    message: str | None
    """Kubernetes' message for the reason."""
    node: str | None
    restarts: int
    """Container restarts, plus the pods that this one replaced."""
    exit_code: int | None
    """Exit code of its container; None while it runs."""
    last_exit_code: int | None
    """Exit code before the last restart, or of the pod that this one replaced."""
    has_run: bool
    """Whether its container has ever started."""
    final_code: int | None = None
    """Final exit code of a StatefulSet pod, which exits once and then waits to be deleted."""
    is_overdue: bool = False
    """Its deletion is overdue, most likely because its node is lost."""
    silent_sec: float | None = None
    """How long its node has been NotReady, or its deletion overdue; None otherwise."""
    cpu: str | None = None
    memory: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_running(self) -> bool:
        return self.phase == "Running" and self.exit_code is None and self.reason is None


def node_index(record: Record, pod: Object) -> int | None:
    """Node rank of a pod; None for a pod that is not part of the run, such as a reader pod."""
    labels = pod["metadata"].get("labels") or {}
    label = _index_label(pod)
    if label is not None:
        # A PyTorchJob numbers its Workers from 0; with a Master, which has node rank 0, their node ranks start at 1.
        is_after_master = record.config.launch.pytorch_master and labels.get(ROLE_LABEL) == "worker"
        return int(label) + is_after_master if re.fullmatch("[0-9]{1,9}", label) else None
    if record.config.launch.kind == "stateful_set":  # before Kubernetes 1.28
        ordinal = re.fullmatch(rf"{re.escape(record.run_id)}-(\d{{1,9}})", pod["metadata"]["name"])
        return int(ordinal[1]) if ordinal else None
    return None


def _index_label(pod: Object) -> str | None:
    labels = pod["metadata"].get("labels") or {}
    return next((str(labels[label]) for label in INDEX_LABELS if label in labels), None)


def unindexed_pods_warning(record: Record, pods: Iterable[Object]) -> str | None:
    """A warning about pods whose index label is not a number; None if there are none."""
    names = [pod["metadata"]["name"] for pod in pods if _index_label(pod) and node_index(record, pod) is None]
    more = ", ..." if len(names) > 3 else ""
    return f"Pods whose index label is not a number: {', '.join(names[:3])}{more}." if names else None


def by_index(record: Record, pods: Iterable[Object]) -> dict[int, list[Object]]:
    """Node rank -> its pods, oldest first: failed pods stay beside their replacements."""
    pods_of: dict[int, list[Object]] = defaultdict(list)
    for pod in pods:
        index = node_index(record, pod)
        # A StatefulSet that was scaled up has extra pods, which are not part of the run.
        if index is not None and index < record.config.launch.node_range[1]:
            pods_of[index].append(pod)
    for own in pods_of.values():
        own.sort(key=lambda pod: (pod["metadata"]["creationTimestamp"], not _has_ended(pod)))
    return dict(sorted(pods_of.items()))


def pod_statuses(
    record: Record, pods: Iterable[Object], usage: dict[str, dict[str, dict[str, str]]] | None = None
) -> list[PodStatus]:
    """One status per node rank, of its newest pod."""
    return [_pod_status(record, index, own, usage or {}) for index, own in by_index(record, pods).items()]


def _pod_status(
    record: Record, index: int, own: list[Object], usage: dict[str, dict[str, dict[str, str]]]
) -> PodStatus:
    pod, name = own[-1], own[-1]["metadata"]["name"]
    state, last, restarts = container_state(pod, record.workload.container)
    before = [_exit_code(record, older) for older in own[:-1]]
    last_code = last.get("terminated", {}).get("exitCode")
    final = final_code(record, pod)
    reason, message = _reason(pod, state)
    count = record.config.launch.processes_per_node
    first = index * count
    used_resources = usage.get(name, {}).get(record.workload.container, {})
    return PodStatus(
        name=name,
        index=index,
        ranks=str(first) if count == 1 else f"{first}-{first + count - 1}",
        phase="Terminating" if "deletionTimestamp" in pod["metadata"] else pod["status"].get("phase", "Unknown"),
        reason=reason,
        message=redacted_line(message) if message else None,
        node=pod["spec"].get("nodeName"),
        restarts=restarts + len(own) - 1 - (final is not None and "terminated" not in state),
        exit_code=_exit_code(record, pod),
        last_exit_code=our_code(record, last_code) if last_code is not None else before[-1] if before else None,
        has_run=len(own) > 1 or bool(restarts) or "running" in state or "startedAt" in state.get("terminated", {}),
        final_code=final,
        is_overdue=is_overdue(pod),
        silent_sec=round(lost.since_sec, 1) if (lost := lost_pod(pod)) else None,
        cpu=used_resources.get("cpu"),
        memory=used_resources.get("memory"),
    )


def container_state(pod: Object, container: str) -> tuple[Object, Object, int]:
    """(state, last state, restarts) of the current container."""
    row = current_container(pod, container)
    return row.get("state") or {}, row.get("lastState") or {}, row.get("restartCount", 0)


def current_container(pod: Object, container: str) -> Object:
    """The status of the container, or of an init container that waits or has failed."""
    status = pod.get("status") or {}
    for row in status.get("initContainerStatuses") or []:
        state = row.get("state") or {}
        if _is_waiting(state) or state.get("terminated", {}).get("exitCode"):
            return dict(row)
    return next((dict(row) for row in status.get("containerStatuses") or [] if row["name"] == container), {})


def _is_waiting(state: Object) -> bool:
    return "waiting" in state and state["waiting"].get("reason") not in _STARTING_REASONS


def _has_ended(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _exit_code(record: Record, pod: Object) -> int | None:
    state, _, _ = container_state(pod, record.workload.container)
    code = state.get("terminated", {}).get("exitCode")
    return None if code is None else our_code(record, code)


def final_code(record: Record, pod: Object) -> int | None:
    """The code with which the main process of a StatefulSet pod ended for good; None while it runs."""
    if record.config.launch.kind != "stateful_set" or record.work.launcher != "llmtrain":
        return None
    state, last, _ = container_state(pod, record.workload.container)
    codes = (ended.get("exitCode") for ended in (state.get("terminated"), last.get("terminated")) if ended)
    return next((code for code in codes if code in FINAL_CODES), None)


def our_code(record: Record, code: int) -> int:
    """The exit code of our contract: under a PyTorchJob, `llmtrain node` adds 128 to codes that should be retried."""
    is_translated = record.config.launch.kind == "pytorch_job" and record.work.launcher == "llmtrain"
    return from_pytorchjob_code(code) if is_translated else code


def worst_code(codes: Iterable[int | None]) -> int | None:
    """The code that represents all."""
    return min((code for code in codes if code is not None), key=severity, default=None)


def _reason(pod: Object, state: Object) -> tuple[str | None, str | None]:
    """(reason, message) why a pod is not running; (None, None) if it runs, succeeded or is starting."""
    status = pod.get("status") or {}
    if waiting := state.get("waiting"):
        reason = waiting.get("reason")
        return (None, None) if reason in _STARTING_REASONS else (reason, waiting.get("message"))
    if ended := state.get("terminated"):
        if status.get("reason"):  # Evicted and DeadlineExceeded are reasons of the pod, not of the container
            return status["reason"], status.get("message")
        return (ended.get("reason"), ended.get("message")) if ended.get("exitCode") else (None, None)
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("reason"), condition.get("message")
    return status.get("reason"), status.get("message")
