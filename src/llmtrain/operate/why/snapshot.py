"""Snapshot: a run's job, pods, events and container exits, as input for the causes, which send no requests."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.launch.record import Record
from llmtrain.launch.workloads.job_set import JOB_NAME
from llmtrain.operate.status.container_exits import (
    ContainerExit,
    exit_histories,
    exits_from_events,
    related_exits,
    with_log,
)
from llmtrain.operate.status.events import event_time, is_about
from llmtrain.operate.status.pods import PodStatus, by_index, pod_statuses, unindexed_pods_warning
from llmtrain.operate.status.progress import read_progress
from llmtrain.operate.status.queue import NOT_QUEUED, QueueState
from llmtrain.operate.status.run_status import (
    MAX_PARALLEL_LOGS,
    RunStatus,
    find_job,
    find_pods,
    idle_code,
    make_status,
    rank_zero_progress,
    read_queue_state,
)
from llmtrain.operate.status.state import ENDED, Observation
from llmtrain.operate.why.run_reports import add_run_reports, needs_run_reports

TAIL_LINES = 200  # of an exited container: enough for an error with its traceback
MAX_LOGS = 16  # of the most severe exits: the others have the same messages
UNREACHABLE = 69  # exit code of processes that could not connect to each other
_OWN_SERVICE = ("indexed_job", "stateful_set")  # operators of other kinds create the Service
_IGNORE_EXITS = ("running", "finished", "stopped", "removed", "incomplete")


@dataclass(frozen=True)
class Stall:
    """A run that logs nothing, and its heartbeats."""

    seconds: float | None
    """Age of the last log line; None if the log cannot be read."""
    silent_ranks: list[int] | None = None
    """Ranks that send no heartbeats; None if heartbeats cannot be read."""
    advancing_ranks: list[int] = field(default_factory=list)
    """Ranks that made progress while their heartbeats were watched."""
    steps: dict[int, int] = field(default_factory=dict)
    """Rank -> step of its last heartbeat."""
    error: str = ""
    """Why heartbeats cannot be read."""


@dataclass(frozen=True)
class Snapshot:
    record: Record
    status: RunStatus
    job: Object | None = None
    conditions: list[Object] = field(default_factory=list)
    """True conditions of the job, and of the Job inside a JobSet or TrainJob."""
    pods: list[tuple[PodStatus, Object]] = field(default_factory=list)
    """The newest pod of each index."""
    exits: list[ContainerExit] = field(default_factory=list)
    """The last exit of each pod, oldest first, without those too old to be related."""
    gave_up: str | None = None
    """The message with which llmtrain stopped restarting the run."""
    events: list[Object] = field(default_factory=list)
    """Events of this run."""
    claims: dict[str, str] = field(default_factory=dict)
    """Claim -> phase, or `missing`; read only while pods are pending."""
    has_service: bool | None = None
    """Whether the headless Service exists; read only if pods could not connect. None: unknown."""
    usage: dict[str, str] = field(default_factory=dict)
    """Pod -> current memory usage."""
    unreadable: list[str] = field(default_factory=list)
    """Messages about what could not be read."""
    stall: Stall | None = None
    queue: QueueState = NOT_QUEUED
    place: str = ""
    """Command-line options that select namespace and cluster, for commands in messages."""

    @property
    def run(self) -> str:
        return f"{self.record.run_id}{self.place}"

    @property
    def expected_pods(self) -> int:
        return self.record.config.launch.node_range[1]

    @property
    def is_active(self) -> bool:
        return self.status.state not in (*ENDED, "suspended", "stopping")

    @property
    def is_running(self) -> bool:
        return self.status.state == "running"

    @property
    def is_waiting(self) -> bool:
        """Active but not training. An elastic run trains while some of its pods are pending."""
        return self.is_active and not self.is_running

    def events_with_reason(self, *reasons: str) -> list[Object]:
        """Newest first."""
        return sorted((e for e in self.events if e.get("reason") in reasons), key=event_time, reverse=True)


def take_snapshot(cluster: Cluster, record: Record) -> Snapshot:
    """Without heartbeats: reading them takes a pod."""
    unreadable: list[str] = []
    job, raw = find_job(cluster, record), find_pods(cluster, record)
    statuses = pod_statuses(record, raw, cluster.usage(record.namespace, record.selector) if raw else None)
    progress = rank_zero_progress(cluster, record, statuses)
    events = _events(cluster, record, unreadable)
    queue = read_queue_state(cluster, record, job, statuses)
    unreadable += [queue.unseen] if queue.unseen else []
    place = cluster.place(record.namespace)
    idle = idle_code(cluster, record, statuses, progress)
    observed = Observation(job, statuses, progress, idle, events, queue, place)
    status = replace(make_status(record, observed), unseen=unindexed_pods_warning(record, raw))
    pods, claims = by_index(record, raw), claim_names(record)
    exits: list[ContainerExit] = []
    gave_up = None
    if status.state not in _IGNORE_EXITS:
        exits, gave_up = _exits(cluster, record, pods, unreadable)
        if record.config.launch.kind == "pytorch_job" and not exits:
            exits = exits_from_events(record, job, (event for event in events if is_about(record, event)))
        if needs_run_reports(record, job, exits):
            exits = add_run_reports(cluster, record, job, exits)
    if progress is None and not exits:
        unreadable.append("The log of the run cannot be read.")
    return Snapshot(
        record=record,
        status=status,
        job=job,
        conditions=_conditions(cluster, record, job, any(pod.phase == "Terminating" for pod in statuses)),
        pods=[(pod, pods[pod.index][-1]) for pod in statuses],
        exits=exits,
        gave_up=gave_up,
        events=[event for event in events if _is_of_run(record, event, claims)],
        claims=_claim_phases(cluster, record, claims) if _has_pending_pods(record, job, statuses) else {},
        has_service=_has_service(cluster, record) if any(each.code == UNREACHABLE for each in exits) else None,
        usage={pod.name: pod.memory for pod in statuses if pod.memory},
        unreadable=unreadable,
        queue=queue,
        place=place,
    )


def _has_pending_pods(record: Record, job: Object | None, pods: list[PodStatus]) -> bool:
    has_too_few = len(pods) < record.config.launch.node_range[1]
    return job is not None and (has_too_few or any(pod.phase == "Pending" for pod in pods))


def _events(cluster: Cluster, record: Record, unreadable: list[str]) -> list[Object]:
    try:
        return cluster.find("v1", "Event", record.namespace)
    except UsageError as error:
        unreadable.append(error.what)
        return []


def claim_names(record: Record) -> dict[str, str]:
    """Volume -> claim."""
    plan = record.plan
    return {volume: plan.claim(volume) for volume in record.config.launch.volumes}


def _is_of_run(record: Record, event: Object, claims: dict[str, str]) -> bool:
    """Whether the event is about the run's job, pods or claims, or its Workload of Kueue."""
    involved = event.get("involvedObject") or {}
    kind, name = involved.get("kind"), str(involved.get("name", ""))
    return (
        is_about(record, event)
        or (kind == "PersistentVolumeClaim" and name in claims.values())
        or (kind == "Workload" and name.startswith(f"{record.workload.kind.lower()}-{record.run_id}-"))
    )


def _conditions(cluster: Cluster, record: Record, job: Object | None, has_terminating_pods: bool) -> list[Object]:
    conditions = _true_conditions(job)
    has_inner = job is not None and record.config.launch.kind in ("job_set", "train_job")
    if has_inner and (has_terminating_pods or any(each["type"] == "Failed" for each in conditions)):
        try:  # the outer job only reports that the inner one failed, and only after its pods have exited
            inner = cluster.get("batch/v1", "Job", f"{record.run_id}-{JOB_NAME}-0", record.namespace)
        except LlmtrainError:
            inner = None
        conditions += _true_conditions(inner)
    return conditions


def _true_conditions(job: Object | None) -> list[Object]:
    conditions = ((job or {}).get("status") or {}).get("conditions") or []
    return [each for each in conditions if each.get("status") == "True"]


def _claim_phases(cluster: Cluster, record: Record, claims: dict[str, str]) -> dict[str, str]:
    phases = {}
    for name in claims.values():
        try:
            claim = cluster.get("v1", "PersistentVolumeClaim", name, record.namespace)
        except LlmtrainError:  # not allowed to read it
            continue
        phases[name] = "missing" if claim is None else str((claim.get("status") or {}).get("phase") or "")
    return phases


def _has_service(cluster: Cluster, record: Record) -> bool | None:
    """None if an operator creates the Service, or it may not be read."""
    if record.config.launch.kind not in _OWN_SERVICE:
        return None
    try:
        return cluster.get("v1", "Service", record.plan.service, record.namespace) is not None
    except LlmtrainError:
        return None


def _exits(
    cluster: Cluster, record: Record, pods: dict[int, list[Object]], unreadable: list[str]
) -> tuple[list[ContainerExit], str | None]:
    """The last exit of each pod. If llmtrain gave up after repeated crashes: those crashes, and its message."""
    by_pod = exit_histories(record, pods)
    if record.config.launch.kind == "stateful_set":
        _add_idle_exits(cluster, record, by_pod)
    last = _read_logs(cluster, record, related_exits(record, [own[0] for own in by_pod if own]), unreadable)
    gave_up = next((each.report for each in last if each.report and each.report.reason == "gave_up"), None)
    if gave_up is None:
        return last, None
    earlier = [next((each for each in own if each.code != 65), None) for own in by_pod]
    crashes = _read_logs(cluster, record, related_exits(record, [each for each in earlier if each]), unreadable)
    return crashes or last, gave_up.message


def _add_idle_exits(cluster: Cluster, record: Record, by_pod: list[list[ContainerExit]]) -> None:
    """Pods of a StatefulSet log their exit code and keep running until they are deleted."""

    def add(own: list[ContainerExit]) -> None:
        if not own or not own[0].is_running:
            return
        current = own.pop(0)
        lines = _log_lines(cluster, record, current) or ()
        code = read_progress(lines).idle_code
        if code:
            own.insert(0, replace(current, code=code, lines=lines))

    with ThreadPoolExecutor(MAX_PARALLEL_LOGS) as threads:
        list(threads.map(add, by_pod))


def _read_logs(
    cluster: Cluster, record: Record, exits: Iterable[ContainerExit], unreadable: list[str]
) -> list[ContainerExit]:
    """The exits in order of time, the most severe of them with their logs."""
    ordered = sorted(exits, key=lambda each: each.severity)

    def read(each: ContainerExit) -> ContainerExit:
        has_error = each.report is not None and each.report.error
        return each if has_error else with_log(each, each.lines or _log_lines(cluster, record, each))

    with ThreadPoolExecutor(MAX_PARALLEL_LOGS) as threads:
        done = [*threads.map(read, ordered[:MAX_LOGS]), *ordered[MAX_LOGS:]]
    message = "Logs cannot be read."
    if any(each.is_unreadable for each in done) and message not in unreadable:
        unreadable.append(message)
    return sorted(done, key=lambda each: (each.finished_at or "9", each.index))


def _log_lines(cluster: Cluster, record: Record, exit_: ContainerExit) -> tuple[str, ...] | None:
    try:
        return tuple(
            cluster.log(exit_.pod, record.namespace, exit_.container, tail=TAIL_LINES, previous=exit_.is_previous)
        )
    except LlmtrainError:  # not allowed to read it, or the node does not respond
        return None
