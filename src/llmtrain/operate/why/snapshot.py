"""Snapshot: a run's job, pods, events and container exits, as input for the causes, which send no requests."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

from llmtrain.errors import ExitCode, LlmtrainError, UsageError
from llmtrain.kubernetes.client import Object
from llmtrain.launch.record import Record
from llmtrain.operate.observed_run import MAX_PARALLEL_LOGS, ObservedRun
from llmtrain.operate.status.container_exits import (
    ContainerExit,
    exit_histories,
    exits_from_events,
    related_exits,
    with_log,
)
from llmtrain.operate.status.events import event_time, is_about
from llmtrain.operate.status.pods import PodStatus
from llmtrain.operate.status.progress import read_progress
from llmtrain.operate.status.queue import NOT_QUEUED, QueueState, is_workload_name
from llmtrain.operate.status.run_status import RunStatus
from llmtrain.operate.why.run_reports import add_run_reports, needs_run_reports
from llmtrain.runs.state import RunState

TAIL_LINES = 200  # of an exited container: enough for an error with its traceback
MAX_LOGS = 16  # of the most severe exits: the others have the same messages
_IGNORE_EXITS = (RunState.RUNNING, RunState.FINISHED, RunState.STOPPED, RunState.REMOVED, RunState.INCOMPLETE)


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
    """True conditions of the job, and of the Job that its controller created (Kind.inner_job)."""
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
        is_held = self.status.state in (RunState.SUSPENDED, RunState.STOPPING)
        return not is_held and not self.status.has_ended

    @property
    def is_running(self) -> bool:
        return self.status.state == RunState.RUNNING

    @property
    def is_waiting(self) -> bool:
        """Active but not training. An elastic run trains while some of its pods are pending."""
        return self.is_active and not self.is_running

    def events_with_reason(self, *reasons: str) -> list[Object]:
        """Newest first."""
        chosen = [event for event in self.events if event.get("reason") in reasons]
        return sorted(chosen, key=event_time, reverse=True)


def take_snapshot(run: ObservedRun) -> Snapshot:
    """Without heartbeats: reading them takes a pod."""
    record = run.record
    unreadable: list[str] = []
    run.events = _events(run, unreadable)  # all of them: a cause may be in any
    if run.queue.unseen:
        unreadable.append(run.queue.unseen)
    status = replace(run.status, unseen=run.unindexed_warning)
    claims = claim_names(record)
    exits: list[ContainerExit] = []
    gave_up = None
    if status.state not in _IGNORE_EXITS:
        # Each source costs more than the one before: pods, then events, then a pod that reads the volume.
        exits, gave_up = _exits(run, unreadable)
        if not exits:
            exits = exits_from_events(record, run.job, (event for event in run.events if is_about(record, event)))
        if needs_run_reports(record, run.job, exits):
            exits = add_run_reports(run, exits)
    if run.progress is None and not exits:
        unreadable.append("The log of the run cannot be read.")
    could_not_connect = any(each.code == ExitCode.UNAVAILABLE for each in exits)
    return Snapshot(
        record=record,
        status=status,
        job=run.job,
        conditions=_conditions(run),
        pods=[(pod, run.pods_by_index[pod.index][-1]) for pod in run.pod_statuses],
        exits=exits,
        gave_up=gave_up,
        events=[event for event in run.events if _is_of_run(record, event, claims)],
        claims=_claim_phases(run, claims) if _has_pending_pods(run) else {},
        has_service=_has_service(run) if could_not_connect else None,
        usage={pod.name: pod.memory for pod in run.pod_statuses if pod.memory},
        unreadable=unreadable,
        queue=run.queue,
        place=run.place,
    )


def _has_pending_pods(run: ObservedRun) -> bool:
    has_too_few = len(run.pod_statuses) < run.record.config.launch.node_range[1]
    return run.job is not None and (has_too_few or any(pod.phase == "Pending" for pod in run.pod_statuses))


def _events(run: ObservedRun, unreadable: list[str]) -> list[Object]:
    try:
        return run.cluster.find("v1", "Event", run.namespace)
    except UsageError as error:
        unreadable.append(error.what)
        return []


def claim_names(record: Record) -> dict[str, str]:
    """Volume -> claim."""
    plan = record.plan
    return {volume: plan.claim(volume) for volume in record.config.launch.volumes}


def _is_of_run(record: Record, event: Object, claims: dict[str, str]) -> bool:
    """Whether the event is about the run's job, pods or claims, or its Workload of Kueue."""
    if is_about(record, event):
        return True
    involved = event.get("involvedObject") or {}
    name = str(involved.get("name", ""))
    if involved.get("kind") == "PersistentVolumeClaim":
        return name in claims.values()
    return involved.get("kind") == "Workload" and is_workload_name(record, name)


def _conditions(run: ObservedRun) -> list[Object]:
    conditions = _true_conditions(run.job)
    inner_job = run.record.kind.inner_job
    if run.job is None or inner_job is None:
        return conditions
    is_terminating = any(pod.phase == "Terminating" for pod in run.pod_statuses)
    has_failed = any(each["type"] == "Failed" for each in conditions)
    # The outer job only reports that the inner one failed, and only after its pods have exited.
    if is_terminating or has_failed:
        with suppress(LlmtrainError):  # not allowed to read it
            conditions += _true_conditions(
                run.cluster.get("batch/v1", "Job", f"{run.run_id}{inner_job}", run.namespace)
            )
    return conditions


def _true_conditions(job: Object | None) -> list[Object]:
    conditions = ((job or {}).get("status") or {}).get("conditions") or []
    return [each for each in conditions if each.get("status") == "True"]


def _claim_phases(run: ObservedRun, claims: dict[str, str]) -> dict[str, str]:
    phases = {}
    for name in claims.values():
        try:
            claim = run.cluster.get("v1", "PersistentVolumeClaim", name, run.namespace)
        except LlmtrainError:  # not allowed to read it
            continue
        phases[name] = "missing" if claim is None else str((claim.get("status") or {}).get("phase") or "")
    return phases


def _has_service(run: ObservedRun) -> bool | None:
    """None if an operator creates the Service, or it may not be read."""
    if not run.record.kind.renders_service:
        return None
    try:
        return run.cluster.get("v1", "Service", run.record.plan.service, run.namespace) is not None
    except LlmtrainError:
        return None


def _exits(run: ObservedRun, unreadable: list[str]) -> tuple[list[ContainerExit], str | None]:
    """The last exit of each pod. If llmtrain gave up after repeated crashes: those crashes, and its message."""
    record = run.record
    by_pod = exit_histories(record, run.pods_by_index)
    if record.kind.pods_idle_at_end:
        _add_idle_exits(run, by_pod)
    last = _read_logs(run, related_exits(record, [own[0] for own in by_pod if own]), unreadable)
    gave_up = _give_up_message(last)
    if gave_up is None:
        return last, None
    earlier = []
    for own in by_pod:
        crashed = [each for each in own if each.code != ExitCode.FAILED]
        earlier += crashed[:1]
    crashes = _read_logs(run, related_exits(record, earlier), unreadable)
    return crashes or last, gave_up


def _give_up_message(exits: list[ContainerExit]) -> str | None:
    for each in exits:
        if each.report and each.report.reason == "gave_up":
            return each.report.message
    return None


def _add_idle_exits(run: ObservedRun, by_pod: list[list[ContainerExit]]) -> None:
    """Pods that idle log their exit code and keep running until they are deleted."""

    def add(own: list[ContainerExit]) -> None:
        if not own or not own[0].is_running:
            return
        current = own.pop(0)
        lines = _log_lines(run, current) or ()
        code = read_progress(lines).idle_code
        if code:
            own.insert(0, replace(current, code=code, lines=lines))

    with ThreadPoolExecutor(MAX_PARALLEL_LOGS) as threads:
        list(threads.map(add, by_pod))


def _read_logs(run: ObservedRun, exits: Iterable[ContainerExit], unreadable: list[str]) -> list[ContainerExit]:
    """The exits in order of time, the most severe of them with their logs."""
    ordered = sorted(exits, key=lambda each: each.severity)

    def read(each: ContainerExit) -> ContainerExit:
        if each.report is not None and each.report.error:
            return each
        return with_log(each, each.lines or _log_lines(run, each))

    with ThreadPoolExecutor(MAX_PARALLEL_LOGS) as threads:
        done = list(threads.map(read, ordered[:MAX_LOGS]))
    done += ordered[MAX_LOGS:]
    message = "Logs cannot be read."
    if any(each.is_unreadable for each in done) and message not in unreadable:
        unreadable.append(message)
    return sorted(done, key=lambda each: (each.finished_at or "9", each.index))  # "9" sorts after every year


def _log_lines(run: ObservedRun, exit_: ContainerExit) -> tuple[str, ...] | None:
    try:
        return tuple(
            run.cluster.log(exit_.pod, run.namespace, exit_.container, tail=TAIL_LINES, previous=exit_.is_previous)
        )
    except LlmtrainError:  # not allowed to read it, or the node does not respond
        return None
