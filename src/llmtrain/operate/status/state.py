"""The state of a run and the reason for it, derived from its record, its job, its pods and the log of rank 0."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmtrain.kubernetes.api_errors import quota
from llmtrain.kubernetes.client import Object
from llmtrain.kubernetes.server_clock import seconds_since
from llmtrain.launch.record import Record, UnreadableRecord
from llmtrain.operate.status.events import had_job, refusal
from llmtrain.operate.status.pods import PodStatus, worst_code
from llmtrain.operate.status.progress import RunProgress
from llmtrain.operate.status.queue import GATED, NOT_QUEUED, QueueState
from llmtrain.redact import redacted_line

ENDED = ("finished", "failed", "stopped", "removed", "incomplete")
"""Final states."""
MEANING = {
    64: "bad usage or config",
    65: "bad data, unusable checkpoint, or training failed",
    69: "peers or a required service unavailable",
    75: "interrupted, or a peer was lost",
    137: "killed or out of memory",
}
EVENTS_KEPT_SEC = 3000.0  # clusters keep events for about an hour
_MODES_WITHOUT_STEPS = ("doctor", "command", "hold")


@dataclass(frozen=True)
class Observation:
    """What was read from the cluster about a run."""

    job: Object | None
    pods: list[PodStatus]
    progress: RunProgress | None = None
    """None if the log was not read."""
    idle_code: int | None = None
    """Exit code of a StatefulSet run whose pods have all ended and wait to be deleted."""
    events: Sequence[Object] = field(default=(), repr=False)
    queue: QueueState = NOT_QUEUED
    """Read only while the run is queued."""
    place: str = ""
    """Command-line options that select namespace and cluster, for commands in messages."""


def find_state(record: Record, observed: Observation) -> str:
    job, pods = observed.job, observed.pods
    if job is None:
        if not all(pod.is_overdue for pod in pods):
            return "stopping"
        if observed.progress is not None and observed.progress.is_done:  # its TTL has expired
            return "finished"
        if record.stopped_at:
            return record.ended_as or "stopped"
        return "removed" if had_job(record, observed.events) or age_sec(record) > EVENTS_KEPT_SEC else "incomplete"
    if "deletionTimestamp" in job["metadata"]:
        return "stopping"
    if observed.idle_code is not None:
        return "failed" if observed.idle_code else "finished"
    ended = job_state(job, record)
    if ended == "active" and is_gated(record, pods):
        return "suspended"
    return ended if ended != "active" else _active_state(record, pods, observed.progress)


def is_gated(record: Record, pods: list[PodStatus]) -> bool:
    """Whether Kueue gates the pods of a StatefulSet."""
    return record.config.launch.queue is not None and any(pod.reason == GATED for pod in pods)


def is_queued(record: Record, job: Object | None, pods: list[PodStatus]) -> bool:
    """Whether the run waits in a queue, according to its job and pods."""
    if job is None or record.config.launch.queue is None or "deletionTimestamp" in job["metadata"]:
        return False
    return job_state(job, record) == "suspended" or is_gated(record, pods)


def scaled_to(record: Record, job: Object | None) -> int | None:
    """The replicas of a StatefulSet that was scaled to a number of pods the run cannot use; None otherwise."""
    if record.config.launch.kind != "stateful_set" or job is None:
        return None
    replicas = int((job.get("spec") or {}).get("replicas", 1))
    fewest, most = record.config.launch.node_range
    return None if fewest <= replicas <= most else replicas


def scaled_text(record: Record, replicas: int) -> str:
    return f"the StatefulSet was scaled to {replicas}, but the run has {_pods_text(record)}"


def _pods_text(record: Record) -> str:
    fewest, most = record.config.launch.node_range
    if fewest < most:
        return f"{fewest} to {most} pods"
    return "1 pod" if most == 1 else f"{most} pods"


def job_state(job: Object, record: Record) -> str:
    """`finished`, `failed`, `suspended` or `active`, from the job's conditions."""
    true = {row["type"] for row in job.get("status", {}).get("conditions") or [] if row.get("status") == "True"}
    states = [state for condition, state in record.workload.states.items() if condition in true]
    return next((state for state in ("failed", "finished", "suspended") if state in states), "active")


def age_sec(record: Record | UnreadableRecord) -> float:
    return seconds_since(record.launched_at) if record.launched_at else 0.0


def _active_state(record: Record, pods: list[PodStatus], progress: RunProgress | None) -> str:
    """`pending`, `starting`, `running` or `restarting`."""
    # At the end pods finish one by one.
    present = sum(pod.is_running or pod.exit_code == 0 or pod.final_code is not None for pod in pods)
    has_restarted = any(
        pod.restarts or (pod.last_exit_code is not None and pod.final_code is None) or pod.phase == "Failed"
        for pod in pods
    )
    # Not `step`: a resumed run logs the step of its checkpoint when it starts.
    has_stepped = progress is not None and progress.max_steps is not None
    if not present:
        return "restarting" if has_restarted or has_stepped else "pending"
    is_complete = present >= record.config.launch.node_range[0]
    if is_complete and (progress is None or progress.has_stepped or record.work.mode in _MODES_WITHOUT_STEPS):
        return "running"
    return "restarting" if has_restarted or has_stepped else "starting"


def find_exit_code(state: str, observed: Observation) -> int | None:
    if state == "finished":
        return 0
    if state != "failed":
        return None
    if observed.idle_code is not None:
        return observed.idle_code
    codes = [code for pod in observed.pods for code in (pod.exit_code, pod.last_exit_code) if code]
    return worst_code(codes)


def explain_state(record: Record, state: str, observed: Observation) -> str | None:
    """The reason for the state in one line, or None."""
    if state == "failed":
        return _explain_failure(record, observed)
    if state == "suspended":
        queue, reason = record.config.launch.queue, observed.queue.waits_for
        return f"queued in {queue}{f': {reason}' if reason else ''}" if queue else "the job is suspended"
    if state == "stopped":
        return f"stopped at {record.stopped_at}"
    if state == "removed":
        return "its job was deleted, or launch.ttl_sec has expired"
    if state == "incomplete":
        run = f"{record.run_id}{observed.place}"
        return f"its launch was interrupted. Complete it: llmtrain resume {run}. Remove it: llmtrain delete {run}"
    if observed.job is None or state in ("stopping", "finished"):
        return None
    return _explain_waiting(record, observed)


def _explain_waiting(record: Record, observed: Observation) -> str | None:
    replicas = scaled_to(record, observed.job)
    if replicas is not None:
        return f"{scaled_text(record, replicas)}. Diagnose it: llmtrain why {record.run_id}{observed.place}"
    lost = [pod for pod in observed.pods if pod.silent_sec is not None]
    if lost:
        return _explain_lost(f"{record.run_id}{observed.place}", lost)
    stuck = [
        pod
        for pod in observed.pods
        if pod.reason and pod.final_code is None and pod.phase not in ("Succeeded", "Terminating")
    ]
    if stuck:
        is_partial = len(stuck) < record.config.launch.node_range[1]
        return reason_text(stuck[0]) + (f" (pod {_indexes_text(stuck)})" if is_partial else "")
    if len(observed.pods) < record.config.launch.node_range[1] and observed.job is not None:
        message = refusal(record, observed.job, observed.events)
        if message:
            return f"pods are refused: {quota(message) if 'exceeded quota' in message else redacted_line(message)}"
    terminating = next((pod for pod in observed.pods if pod.phase == "Terminating"), None)
    if terminating:
        return f"{terminating.name} is being deleted" + (f" on {terminating.node}" if terminating.node else "")
    restarted = next((pod for pod in observed.pods if pod.last_exit_code and pod.final_code is None), None)
    return f"pod {restarted.index} restarted after exit {code_text(restarted.last_exit_code)}" if restarted else None


def _explain_lost(run: str, lost: list[PodStatus]) -> str:
    nodes = dict.fromkeys(pod.node or "a node" for pod in lost[:8])
    longest = max(pod.silent_sec or 0.0 for pod in lost)
    return (
        f"{', '.join(nodes)} {'has' if len(nodes) == 1 else 'have'} been NotReady for {longest:.0f} s; pod "
        f"{_indexes_text(lost)} is not being rescheduled. Replace it: llmtrain recover {run}"
    )


def _indexes_text(pods: list[PodStatus]) -> str:
    return ", ".join(str(pod.index) for pod in pods[:8])


def _explain_failure(record: Record, observed: Observation) -> str | None:
    code = find_exit_code("failed", observed)
    conditions = (observed.job or {}).get("status", {}).get("conditions") or []
    failed: Object = next((row for row in conditions if record.workload.states.get(row["type"]) == "failed"), {})
    limits = {
        "DeadlineExceeded": "launch.active_deadline_sec exceeded",
        "BackoffLimitExceeded": "restart limit reached",
    }
    limit = limits.get(failed.get("reason", ""))
    out_of_memory = next((pod.name for pod in observed.pods if pod.reason == "OOMKilled"), None)
    parts = [
        f"exit {code_text(code)}" if code else None,
        f"{out_of_memory} ran out of memory (launch.resources.memory)" if out_of_memory else None,
        limit or (redacted_line(failed.get("message") or "") if not code else None),
    ]
    return "; ".join(part for part in parts if part) or None


def code_text(code: int | None) -> str:
    return f"code {code}" + (f" ({MEANING[code]})" if code in MEANING else "")


def reason_text(pod: PodStatus) -> str:
    """`ImagePullBackOff: message of the kubelet`"""
    reason = "unschedulable" if pod.reason == "Unschedulable" else pod.reason
    if pod.exit_code is not None:
        reason = code_text(pod.exit_code) if pod.reason == "Error" else f"{pod.reason}, {code_text(pod.exit_code)}"
    if pod.reason == "CrashLoopBackOff":
        return f"CrashLoopBackOff: exited with {code_text(pod.last_exit_code)}; waiting to restart"
    return f"{reason}: {message_text(pod)}" if pod.message else str(reason)


def message_text(pod: PodStatus) -> str:
    """The message of Kubernetes without the back-off notice that precedes the cause."""
    message = pod.message or pod.reason or ""
    return message.partition("ErrImagePull: ")[2] or message
