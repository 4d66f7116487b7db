"""The state of a run in one word, and why in one line: from its record, its job, its pods and rank 0's log."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmtrain.kubernetes.api_errors import one_line, quota
from llmtrain.kubernetes.client import Object
from llmtrain.kubernetes.server_clock import seconds_since
from llmtrain.launch.record import Record, UnreadableRecord
from llmtrain.operate.status.events import had_job, refusal
from llmtrain.operate.status.pods import PodStatus, worst_code
from llmtrain.operate.status.progress import RunProgress
from llmtrain.operate.status.queue import GATED, NOT_QUEUED, QueueState

ENDED = ("finished", "failed", "stopped", "removed", "incomplete")
"""The states that do not change any more by themselves."""
MEANING = {
    64: "bad usage or config",
    65: "bad data, an unusable checkpoint, or given up",
    69: "the processes did not find each other in time",
    75: "told to stop, or a peer was lost",
    137: "killed, or out of memory",
}
EVENTS_KEPT_SEC = 3000.0  # a little less than clusters do
_SILENT_MODES = ("doctor", "command", "hold")  # no steps are logged


@dataclass(frozen=True)
class Seen:
    """What was found of a run."""

    job: Object | None
    pods: list[PodStatus]
    progress: RunProgress | None = None
    """None where the log was not read."""
    idle_code: int | None = None
    """Where every pod waits to be removed (StatefulSet): what they ended with."""
    events: Sequence[Object] = field(default=(), repr=False)
    queue: QueueState = NOT_QUEUED
    """Looked at only while it waits in one."""
    place: str = ""
    """Options that name namespace and cluster, for commands that can be typed."""


def find_state(record: Record, seen: Seen) -> str:
    job, pods = seen.job, seen.pods
    if job is None:
        if not all(pod.is_overdue for pod in pods):
            return "stopping"
        if seen.progress is not None and seen.progress.is_done:  # removed by its ttl before anybody looked
            return "finished"
        if record.stopped_at:
            return record.ended_as or "stopped"
        return "removed" if had_job(record, seen.events) or age_sec(record) > EVENTS_KEPT_SEC else "incomplete"
    if "deletionTimestamp" in job["metadata"]:
        return "stopping"
    if seen.idle_code is not None:
        return "failed" if seen.idle_code else "finished"
    ended = job_state(job, record)
    if ended == "active" and is_gated(record, pods):
        return "suspended"
    return ended if ended != "active" else _active_state(record, pods, seen.progress)


def is_gated(record: Record, pods: list[PodStatus]) -> bool:
    """Whether Kueue holds the pods of a StatefulSet back."""
    return record.config.launch.queue is not None and any(pod.reason == GATED for pod in pods)


def wants_queue_state(record: Record, job: Object | None, pods: list[PodStatus]) -> bool:
    """Whether it waits in a queue, as far as its job and its pods say."""
    if job is None or record.config.launch.queue is None or "deletionTimestamp" in job["metadata"]:
        return False
    return job_state(job, record) == "suspended" or is_gated(record, pods)


def scaled_to(record: Record, job: Object | None) -> int | None:
    """The replicas of a StatefulSet that somebody has scaled to a number of pods that the run does not have."""
    if record.config.launch.kind != "stateful_set" or job is None:
        return None
    replicas = int((job.get("spec") or {}).get("replicas", 1))
    fewest, most = record.config.launch.node_range
    return None if fewest <= replicas <= most else replicas


def scaled_text(record: Record, replicas: int) -> str:
    return f"the StatefulSet was scaled to {replicas}, but the run has {_nodes_text(record)}"


def _nodes_text(record: Record) -> str:
    fewest, most = record.config.launch.node_range
    if fewest < most:
        return f"{fewest} to {most} nodes"
    return "1 node" if most == 1 else f"{most} nodes"


def job_state(job: Object, record: Record) -> str:
    """`finished`, `failed`, `suspended` or `active`, by the job's own conditions."""
    true = {row["type"] for row in job.get("status", {}).get("conditions") or [] if row.get("status") == "True"}
    states = [state for condition, state in record.workload.states.items() if condition in true]
    return next((state for state in ("failed", "finished", "suspended") if state in states), "active")


def age_sec(record: Record | UnreadableRecord) -> float:
    return seconds_since(record.launched_at) if record.launched_at else 0.0


def _active_state(record: Record, pods: list[PodStatus], progress: RunProgress | None) -> str:
    """`pending`, `starting`, `running` or `restarting`."""
    there = sum(
        pod.is_running or pod.exit_code == 0 or pod.final_code is not None for pod in pods
    )  # at the end nodes leave one by one
    has_restarted = any(
        pod.restarts or (pod.last_exit_code is not None and pod.final_code is None) or pod.phase == "Failed"
        for pod in pods
    )
    has_stepped = progress is not None and progress.step is not None
    if not there:
        return "restarting" if has_restarted or has_stepped else "pending"
    is_whole = there >= record.config.launch.node_range[0]
    if is_whole and (progress is None or progress.has_stepped or record.work.mode in _SILENT_MODES):
        return "running"
    return "restarting" if has_restarted or has_stepped else "starting"


def find_exit_code(state: str, seen: Seen) -> int | None:
    if state == "finished":
        return 0
    if state != "failed":
        return None
    if seen.idle_code is not None:
        return seen.idle_code
    codes = [code for pod in seen.pods for code in (pod.exit_code, pod.last_exit_code) if code]
    return worst_code(codes)


def explain_state(record: Record, state: str, seen: Seen) -> str | None:
    """One line, or None where there is nothing to say."""
    if state == "failed":
        return _explain_failure(record, seen)
    if state == "suspended":
        queue, said = record.config.launch.queue, seen.queue.waits_for
        return f"waits in the queue {queue}{f': {said}' if said else ''}" if queue else "suspended by somebody"
    if state == "stopped":
        return f"stopped at {record.stopped_at}"
    if state == "removed":
        return "its job is gone: deleted by somebody, or launch.ttl_sec is over"
    if state == "incomplete":
        run = f"{record.run_id}{seen.place}"
        return f"its launch was cut short: llmtrain resume {run} makes it whole, llmtrain delete {run} clears it away"
    if seen.job is None or state in ("stopping", "finished"):
        return None
    return _explain_waiting(record, seen)


def _explain_waiting(record: Record, seen: Seen) -> str | None:
    replicas = scaled_to(record, seen.job)
    if replicas is not None:
        return f"{scaled_text(record, replicas)}: llmtrain why {record.run_id}{seen.place} says what to do"
    silent = [pod for pod in seen.pods if pod.silent_sec is not None]
    if silent:
        return _explain_silent(f"{record.run_id}{seen.place}", silent)
    stuck = [
        pod
        for pod in seen.pods
        if pod.reason and pod.final_code is None and pod.phase not in ("Succeeded", "Terminating")
    ]
    if stuck:
        others = len(stuck) < record.config.launch.node_range[1]
        return reason_text(stuck[0]) + (f" (node {', '.join(str(pod.index) for pod in stuck[:8])})" if others else "")
    if len(seen.pods) < record.config.launch.node_range[1] and seen.job is not None:
        said = refusal(record, seen.job, seen.events)
        if said:
            return f"pods are refused: {quota(said) if 'exceeded quota' in said else one_line(said)}"
    leaving = next((pod for pod in seen.pods if pod.phase == "Terminating"), None)
    if leaving:
        return f"{leaving.name} is being removed" + (f" from {leaving.node}" if leaving.node else "")
    ended = next((pod for pod in seen.pods if pod.last_exit_code and pod.final_code is None), None)
    return f"node {ended.index} ended with {code_text(ended.last_exit_code)}, and was started again" if ended else None


def _explain_silent(run: str, silent: list[PodStatus]) -> str:
    names = dict.fromkeys(pod.node or "a machine" for pod in silent[:8])
    machines = ", ".join(names)
    longest = max(pod.silent_sec or 0.0 for pod in silent)
    return (
        f"{machines} {'does' if len(names) == 1 else 'do'} not answer for {longest:.0f} s, and nothing takes the "
        f"place of node {', '.join(str(pod.index) for pod in silent[:8])}: llmtrain recover {run} gives it up"
    )


def _explain_failure(record: Record, seen: Seen) -> str | None:
    code = find_exit_code("failed", seen)
    conditions = (seen.job or {}).get("status", {}).get("conditions") or []
    failed: Object = next((row for row in conditions if record.workload.states.get(row["type"]) == "failed"), {})
    limits = {"DeadlineExceeded": "launch.active_deadline_sec is over", "BackoffLimitExceeded": "no restarts are left"}
    said = limits.get(failed.get("reason", ""))
    by_memory = next((pod.name for pod in seen.pods if pod.reason == "OOMKilled"), None)
    parts = [
        f"exit {code_text(code)}" if code else None,
        f"{by_memory} ran out of memory (launch.resources.memory)" if by_memory else None,
        said or (one_line(failed.get("message") or "") if not code else None),
    ]
    return "; ".join(part for part in parts if part) or None


def code_text(code: int | None) -> str:
    return f"code {code}" + (f" ({MEANING[code]})" if code in MEANING else "")


def reason_text(pod: PodStatus) -> str:
    """`ImagePullBackOff: what the kubelet says`."""
    word = "unschedulable" if pod.reason == "Unschedulable" else pod.reason
    if pod.exit_code is not None:
        word = code_text(pod.exit_code) if pod.reason == "Error" else f"{pod.reason}, {code_text(pod.exit_code)}"
    if pod.reason == "CrashLoopBackOff":
        return f"ended with {code_text(pod.last_exit_code)}; the cluster waits before it starts it again"
    return f"{word}: {message_text(pod)}" if pod.message else str(word)


def message_text(pod: PodStatus) -> str:
    """The cluster's sentence, without the waiting that the kubelet speaks of before the cause."""
    said = pod.message or pod.reason or ""
    return said.partition("ErrImagePull: ")[2] or said
