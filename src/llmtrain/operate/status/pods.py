"""The pods of a run: node rank, phase and reason of each."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from llmtrain.core.redact import redacted_line
from llmtrain.distributed.platform_codes import FINAL_CODES
from llmtrain.distributed.worker_exit import severity
from llmtrain.kubernetes.client import Object
from llmtrain.kubernetes.server_clock import seconds_since
from llmtrain.launch.kinds.base import pod_index
from llmtrain.launch.objects import is_overdue
from llmtrain.launch.record import Record
from llmtrain.operate.status.lost_nodes import lost_pod

_STARTING_REASONS = ("ContainerCreating", "PodInitializing")
Usage = dict[str, dict[str, dict[str, str]]]
"""Pod -> container -> its cpu and memory, as quantities."""


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
    """Final exit code of a pod that exits once and then waits to be deleted (Kind.pods_idle_at_end)."""
    is_overdue: bool = False
    """Its deletion is overdue, most likely because its node is lost."""
    silent_sec: float | None = None
    """How long its node has been NotReady, or its deletion overdue; None otherwise."""
    cpu: str | None = None
    memory: str | None = None
    held_seconds: float = 0.0
    """How long it, and the pods that it replaced and that still exist, have held their node's resources."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_running(self) -> bool:
        return self.phase == "Running" and self.exit_code is None and self.reason is None

    @property
    def is_mounting(self) -> bool:
        """Whether it waits on its node, for volumes or for the container, and Kubernetes gives no reason."""
        return self.phase == "Pending" and not self.has_run and self.node is not None and self.reason is None


def node_index(record: Record, pod: Object) -> int | None:
    """Node rank of a pod; None for a pod that is not part of the run, such as a reader pod."""
    return record.kind.node_rank(pod, record.run_id)


def unindexed_pods_warning(record: Record, pods: Iterable[Object]) -> str | None:
    """A warning about pods whose index label is not a number; None if there are none."""
    names = []
    for pod in pods:
        if pod_index(pod) and node_index(record, pod) is None:
            names.append(pod["metadata"]["name"])
    if not names:
        return None
    more = ", ..." if len(names) > 3 else ""
    return f"Pods whose index label is not a number: {', '.join(names[:3])}{more}."


def by_index(record: Record, pods: Iterable[Object]) -> dict[int, list[Object]]:
    """Node rank -> its pods, oldest first: failed pods stay beside their replacements."""
    pods_of: dict[int, list[Object]] = defaultdict(list)
    for pod in pods:
        index = node_index(record, pod)
        # A job that was scaled up has extra pods, which are not part of the run.
        if index is not None and index < record.config.launch.node_range[1]:
            pods_of[index].append(pod)
    for own in pods_of.values():
        # Of two pods created in the same second, the one that has ended is the older one.
        own.sort(key=lambda pod: (pod["metadata"]["creationTimestamp"], not _has_ended(pod)))
    return dict(sorted(pods_of.items()))


def pod_statuses(record: Record, pods: Iterable[Object], usage: Usage | None = None) -> list[PodStatus]:
    """One status per node rank, of its newest pod."""
    statuses = []
    for index, own in by_index(record, pods).items():
        statuses.append(_pod_status(record, index, own, usage or {}))
    return statuses


def _pod_status(record: Record, index: int, own: list[Object], usage: Usage) -> PodStatus:
    """`own`: the pods of this node rank, oldest first."""
    pod = own[-1]
    name = pod["metadata"]["name"]
    state, last, restarts = container_state(pod, record.kind.container)
    final = final_code(record, pod)
    # Do not count the last restart: the pod only idles after it.
    is_idling = final is not None and "terminated" not in state
    reason, message = _reason(pod, state)
    lost = lost_pod(pod)
    used_resources = usage.get(name, {}).get(record.kind.container, {})
    has_been_replaced = len(own) > 1
    return PodStatus(
        name=name,
        index=index,
        ranks=_ranks_text(index, record.config.launch.processes_per_node),
        phase=_phase(pod),
        reason=reason,
        message=redacted_line(message) if message else None,
        node=pod["spec"].get("nodeName"),
        restarts=restarts + len(own) - 1 - is_idling,
        exit_code=_exit_code(record, pod),
        last_exit_code=_last_exit_code(record, own, last),
        has_run=has_been_replaced or bool(restarts) or _was_started(state),
        final_code=final,
        is_overdue=is_overdue(pod),
        silent_sec=round(lost.since_sec, 1) if lost else None,
        cpu=used_resources.get("cpu"),
        memory=used_resources.get("memory"),
        held_seconds=round(sum(_held_seconds(record, each) for each in own), 1),
    )


def _held_seconds(record: Record, pod: Object) -> float:
    state, _, _ = container_state(pod, record.kind.container)
    begin = pod["status"].get("startTime")
    if not begin:  # not on a node yet
        return 0.0
    held = seconds_since(begin)
    finished = (state.get("terminated") or {}).get("finishedAt")
    if _has_ended(pod) and finished:
        held -= seconds_since(finished)
    return max(0.0, held)


def _phase(pod: Object) -> str:
    """The phase that kubectl shows: the API has none for a pod that is being deleted."""
    if "deletionTimestamp" in pod["metadata"]:
        return "Terminating"
    return str(pod["status"].get("phase", "Unknown"))


def _was_started(state: Object) -> bool:
    return "running" in state or "startedAt" in state.get("terminated", {})


def _ranks_text(index: int, count: int) -> str:
    first = index * count
    if count == 1:
        return str(first)
    return f"{first}-{first + count - 1}"


def _last_exit_code(record: Record, own: list[Object], last_state: Object) -> int | None:
    """Exit code of its container before the last restart, else of the pod that it replaced."""
    code = last_state.get("terminated", {}).get("exitCode")
    if code is not None:
        return our_code(record, code)
    if len(own) > 1:
        return _exit_code(record, own[-2])
    return None


def container_state(pod: Object, container: str) -> tuple[Object, Object, int]:
    """(state, last state, restarts) of the current container."""
    row = current_container(pod, container)
    return row.get("state") or {}, row.get("lastState") or {}, row.get("restartCount", 0)


def current_container(pod: Object, container: str) -> Object:
    """The status of the container or, until it has started, of an init container that waits or has failed. Sidecars
    among the init containers run, and may fail, beside it."""
    status = pod.get("status") or {}
    own: Object = {}
    for row in status.get("containerStatuses") or []:
        if row["name"] == container:
            own = row
            break
    if _has_started(own.get("state") or {}):
        return own
    for row in status.get("initContainerStatuses") or []:
        state = row.get("state") or {}
        if _is_waiting(state) or state.get("terminated", {}).get("exitCode"):
            return dict(row)
    return own


def _has_started(state: Object) -> bool:
    return "running" in state or "terminated" in state or _is_waiting(state)


def _is_waiting(state: Object) -> bool:
    return "waiting" in state and state["waiting"].get("reason") not in _STARTING_REASONS


def _has_ended(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _exit_code(record: Record, pod: Object) -> int | None:
    state, _, _ = container_state(pod, record.kind.container)
    code = state.get("terminated", {}).get("exitCode")
    return None if code is None else our_code(record, code)


def final_code(record: Record, pod: Object) -> int | None:
    """The code with which the main process of a pod that then idles ended for good; None while it runs."""
    if not record.kind.pods_idle_at_end or record.task.launcher != "llmtrain":
        return None
    state, last, _ = container_state(pod, record.kind.container)
    for each in (state, last):
        code = (each.get("terminated") or {}).get("exitCode")
        if code in FINAL_CODES:
            return int(code)
    return None


def our_code(record: Record, code: int) -> int:
    """The exit code of our contract: `llmtrain node` adapts codes to what the kind retries, torchrun does not."""
    if record.task.launcher == "llmtrain":
        return record.kind.llmtrain_code(code)
    return code


def worst_code(codes: Iterable[int | None]) -> int | None:
    """The code that represents all: a user error before a crash, a crash before an interruption."""
    known = [code for code in codes if code is not None]
    return min(known, key=severity, default=None)


def _reason(pod: Object, state: Object) -> tuple[str | None, str | None]:
    """(reason, message) why a pod is not running; (None, None) if it runs, succeeded or is starting."""
    status = pod.get("status") or {}
    waiting = state.get("waiting")
    if waiting:
        if waiting.get("reason") in _STARTING_REASONS:
            return None, None
        return waiting.get("reason"), waiting.get("message")
    ended = state.get("terminated")
    if ended:
        if status.get("reason"):  # Evicted and DeadlineExceeded are reasons of the pod, not of the container
            return status["reason"], status.get("message")
        if ended.get("exitCode"):
            return ended.get("reason"), ended.get("message")
        return None, None
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("reason"), condition.get("message")
    return status.get("reason"), status.get("message")
