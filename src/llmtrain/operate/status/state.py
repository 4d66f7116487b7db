"""The state of a run and the reason for it, derived from its record, its job, its pods and the log of rank 0."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmtrain.core.redact import redacted_line
from llmtrain.core.text import plural
from llmtrain.errors import ExitCode
from llmtrain.kubernetes.api_errors import quota
from llmtrain.kubernetes.client import Object
from llmtrain.kubernetes.server_clock import seconds_since
from llmtrain.launch.record import Record, UnreadableRecord
from llmtrain.operate.status.events import failed_mount, had_job, refusal
from llmtrain.operate.status.pods import PodStatus, worst_code
from llmtrain.operate.status.progress import RunProgress
from llmtrain.operate.status.queue import GATED, NOT_QUEUED, QueueState
from llmtrain.runs.state import RunState

EVENTS_KEPT_SEC = 3000.0  # clusters keep events for about an hour
# Other codes only mean that the process crashed.
_EXPLAINED = (ExitCode.USAGE, ExitCode.FAILED, ExitCode.UNAVAILABLE, ExitCode.INTERRUPTED, ExitCode.KILLED)
_LIMITS = {
    "DeadlineExceeded": "launch.active_deadline_sec exceeded",
    "BackoffLimitExceeded": "restart limit reached",
}  # reason of the condition -> the limit
MAX_NAMED = 8  # pods or nodes in a message
_MODES_WITHOUT_STEPS = ("doctor", "command", "hold")


@dataclass(frozen=True)
class Observation:
    """What was read from the cluster about a run."""

    job: Object | None
    pods: list[PodStatus]
    progress: RunProgress | None = None
    """None if the log was not read."""
    idle_code: int | None = None
    """Exit code of a run whose pods have all ended and wait to be deleted (Kind.pods_idle_at_end)."""
    events: Sequence[Object] = field(default=(), repr=False)
    queue: QueueState = NOT_QUEUED
    """Read only while the run is queued."""
    place: str = ""
    """Command-line options that select namespace and cluster, for commands in messages."""


def find_state(record: Record, observed: Observation) -> RunState:
    job = observed.job
    pods = observed.pods
    if job is None:
        return _state_without_job(record, observed)
    if "deletionTimestamp" in job["metadata"]:
        return RunState.STOPPING
    if observed.idle_code == 0:
        return RunState.FINISHED
    if observed.idle_code is not None:
        return RunState.FAILED
    state = record.kind.state(job)
    if state is not None:
        return state
    if is_gated(record, pods):
        return RunState.SUSPENDED
    return _active_state(record, pods, observed.progress)


def _state_without_job(record: Record, observed: Observation) -> RunState:
    if not all(pod.is_overdue for pod in observed.pods):
        return RunState.STOPPING
    if observed.progress is not None and observed.progress.is_done:  # its TTL has expired
        return RunState.FINISHED
    if record.stopped_at:
        if record.ended_as in (RunState.FINISHED, RunState.FAILED):  # `stop` of a run that had ended
            return RunState(str(record.ended_as))
        return RunState.STOPPED
    # Without events of its job, an old run was removed: clusters do not keep events that long.
    if had_job(record, observed.events) or age_sec(record) > EVENTS_KEPT_SEC:
        return RunState.REMOVED
    return RunState.INCOMPLETE


def is_gated(record: Record, pods: list[PodStatus]) -> bool:
    """Whether Kueue gates the pods, because it cannot suspend the kind."""
    return record.config.launch.queue is not None and any(pod.reason == GATED for pod in pods)


def is_queued(record: Record, job: Object | None, pods: list[PodStatus]) -> bool:
    """Whether the run waits in a queue, according to its job and pods."""
    if job is None or record.config.launch.queue is None or "deletionTimestamp" in job["metadata"]:
        return False
    return record.kind.state(job) == RunState.SUSPENDED or is_gated(record, pods)


def scaled_to(record: Record, job: Object | None) -> int | None:
    """The replicas of a job that was scaled to a number of pods the run cannot use; None otherwise."""
    if job is None:
        return None
    replicas = record.kind.replicas(job)
    fewest, most = record.config.launch.node_range
    if replicas is None or fewest <= replicas <= most:
        return None
    return replicas


def scaled_text(record: Record, replicas: int) -> str:
    return f"the {record.kind.object_kind} was scaled to {replicas}, but the run has {_pods_text(record)}"


def _pods_text(record: Record) -> str:
    fewest, most = record.config.launch.node_range
    if fewest < most:
        return f"{fewest} to {most} pods"
    return plural(most, "pod")


def age_sec(record: Record | UnreadableRecord) -> float:
    return seconds_since(record.launched_at) if record.launched_at else 0.0


def _active_state(record: Record, pods: list[PodStatus], progress: RunProgress | None) -> RunState:
    """PENDING, STARTING, RUNNING or RESTARTING."""
    # Not only running pods: at the end they finish one by one.
    present = sum(pod.is_running or pod.exit_code == 0 or pod.final_code is not None for pod in pods)
    is_complete = present > 0 and present >= record.config.launch.node_range[0]
    # Without its log, running pods have to be enough.
    is_training = progress is None or progress.has_stepped
    if is_complete and (is_training or record.task.mode in _MODES_WITHOUT_STEPS):
        return RunState.RUNNING
    # Not `step`: a resumed run logs the step of its checkpoint when it starts.
    had_stepped = progress is not None and progress.max_steps is not None
    if had_stepped or any(_has_restarted(pod) for pod in pods):
        return RunState.RESTARTING
    return RunState.STARTING if present else RunState.PENDING


def _has_restarted(pod: PodStatus) -> bool:
    if pod.restarts or pod.phase == "Failed":
        return True
    return pod.last_exit_code is not None and pod.final_code is None


def find_exit_code(state: RunState, observed: Observation) -> int | None:
    if state == RunState.FINISHED:
        return 0
    if state != RunState.FAILED:
        return None
    if observed.idle_code is not None:
        return observed.idle_code
    codes: list[int | None] = []
    for pod in observed.pods:
        codes += (pod.exit_code or None, pod.last_exit_code or None)  # a pod that succeeded does not decide
    return worst_code(codes)


def explain_state(record: Record, state: RunState, observed: Observation) -> str | None:
    """The reason for the state in one line, or None."""
    if state == RunState.FAILED:
        return _explain_failure(record, observed)
    if state == RunState.SUSPENDED:
        return _explain_suspended(record.config.launch.queue, observed.queue.waits_for)
    if state == RunState.STOPPED:
        return f"stopped at {record.stopped_at}"
    if state == RunState.REMOVED:
        return "its job was deleted, or launch.ttl_sec has expired"
    if state == RunState.INCOMPLETE:
        run = f"{record.run_id}{observed.place}"
        return f"its launch was interrupted. Complete it: llmtrain resume {run}. Remove it: llmtrain delete {run}"
    if observed.job is None or state in (RunState.STOPPING, RunState.FINISHED):
        return None
    return _explain_waiting(record, observed)


def _explain_suspended(queue: str | None, waits_for: str | None) -> str:
    if not queue:
        return "the job is suspended"
    text = f"queued in {queue}"
    if waits_for:
        text += f": {waits_for}"
    return text


def _explain_waiting(record: Record, observed: Observation) -> str | None:
    """Why an active run does not run, or runs with fewer pods: the most certain reason first."""
    run = f"{record.run_id}{observed.place}"
    wanted = record.config.launch.node_range[1]
    replicas = scaled_to(record, observed.job)
    if replicas is not None:
        return f"{scaled_text(record, replicas)}. Diagnose it: llmtrain why {run}"
    lost = [pod for pod in observed.pods if pod.silent_sec is not None]
    if lost:
        return _explain_lost(run, lost)
    stuck = [pod for pod in observed.pods if _is_stuck(pod)]
    if stuck:
        text = reason_text(stuck[0])
        if len(stuck) < wanted:
            text += f" (pod {_indexes_text(stuck)})"
        return text
    if len(observed.pods) < wanted and observed.job is not None:
        message = refusal(record, observed.job, observed.events)
        if message:
            return f"pods are refused: {_refusal_text(message)}"
    mounting = {pod.name for pod in observed.pods if pod.is_mounting}
    mount = failed_mount(record, mounting, observed.events)
    if mount:
        return redacted_line(mount)
    for pod in observed.pods:
        if pod.phase == "Terminating":
            on_node = f" on {pod.node}" if pod.node else ""
            return f"{pod.name} is being deleted{on_node}"
    for pod in observed.pods:
        if pod.last_exit_code and pod.final_code is None:
            return f"pod {pod.index} restarted after exit {code_text(pod.last_exit_code)}"
    return None


def _is_stuck(pod: PodStatus) -> bool:
    """Whether Kubernetes gives a reason why it does not run. One that has ended for good, or is being deleted, is not
    stuck."""
    return bool(pod.reason) and pod.final_code is None and pod.phase not in ("Succeeded", "Terminating")


def _refusal_text(message: str) -> str:
    if "exceeded quota" in message:
        return quota(message)
    return redacted_line(message)


def _explain_lost(run: str, lost: list[PodStatus]) -> str:
    nodes = dict.fromkeys(pod.node or "a node" for pod in lost[:MAX_NAMED])
    have = "has" if len(nodes) == 1 else "have"
    longest = max(pod.silent_sec or 0.0 for pod in lost)
    return (
        f"{', '.join(nodes)} {have} been NotReady for {longest:.0f} s; pod {_indexes_text(lost)} is not being "
        f"rescheduled. Replace it: llmtrain recover {run}"
    )


def _indexes_text(pods: list[PodStatus]) -> str:
    return ", ".join(str(pod.index) for pod in pods[:MAX_NAMED])


def _explain_failure(record: Record, observed: Observation) -> str | None:
    code = find_exit_code(RunState.FAILED, observed)
    parts = []
    if code:
        parts.append(f"exit {code_text(code)}")
    for pod in observed.pods:
        if pod.reason == "OOMKilled":
            parts.append(f"{pod.name} ran out of memory (launch.resources.memory)")
            break
    condition = _failed_condition(record, observed.job or {})
    limit = _LIMITS.get(condition.get("reason", ""))
    if limit:
        parts.append(limit)
    elif not code and condition.get("message"):
        parts.append(redacted_line(condition["message"]))
    return "; ".join(parts) or None


def _failed_condition(record: Record, job: Object) -> Object:
    """The condition that says that the job failed; empty if there is none."""
    for row in job.get("status", {}).get("conditions") or []:
        if record.kind.conditions.get(row["type"]) == RunState.FAILED:
            return dict(row)
    return {}


def code_text(code: int | None) -> str:
    text = f"code {code}"
    meaning = exit_meaning(code)
    if meaning:
        text += f" ({meaning})"
    return text


def exit_meaning(code: int | None) -> str | None:
    """What an exit code of the contract means; None for a crash."""
    for known in _EXPLAINED:
        if known == code:
            return known.meaning
    return None


def reason_text(pod: PodStatus) -> str:
    """`ImagePullBackOff: message of the kubelet`"""
    if pod.reason == "CrashLoopBackOff":
        return f"CrashLoopBackOff: exited with {code_text(pod.last_exit_code)}; waiting to restart"
    text = str(pod.reason)
    if pod.exit_code is not None and pod.reason == "Error":  # the reason adds nothing to the code
        text = code_text(pod.exit_code)
    elif pod.exit_code is not None:
        text += f", {code_text(pod.exit_code)}"
    elif pod.reason == "Unschedulable":
        text = "unschedulable"
    if pod.message:
        text += f": {message_text(pod)}"
    return text


def message_text(pod: PodStatus) -> str:
    """The message of Kubernetes without the back-off notice that precedes the cause."""
    message = pod.message or pod.reason or ""
    return message.partition("ErrImagePull: ")[2] or message
