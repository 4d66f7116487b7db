"""The status of one run or of all runs, read with few requests to the API server."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.kubernetes.api_errors import KindNotFound
from llmtrain.kubernetes.client import PLURALS, Cluster, Labels, Object
from llmtrain.kubernetes.labels import APP_LABEL, belongs_to_run, run_id_of
from llmtrain.launch.record import Record, UnreadableRecord, all_records
from llmtrain.operate.status.events import find_events
from llmtrain.operate.status.pods import PodStatus, pod_statuses, unindexed_pods_warning, worst_code
from llmtrain.operate.status.progress import RunProgress, read_progress
from llmtrain.operate.status.queue import NOT_QUEUED, QueueState, find_queue_state
from llmtrain.operate.status.state import (
    ENDED,
    Observation,
    age_sec,
    explain_state,
    find_exit_code,
    find_state,
    is_queued,
)
from llmtrain.redact import redacted_line

TAIL_LINES = 400  # of the log of rank 0: enough to contain a step line
IDLE_LINES = 5  # the exit code of a waiting pod is in its last line
MAX_PARALLEL_LOGS = 16
_ALL_RUNS: Labels = {**APP_LABEL}


@dataclass(frozen=True)
class RunStatus:
    run_id: str
    namespace: str
    kind: str
    mode: str
    state: str
    """pending, starting, running, restarting, suspended, stopping; finished, failed, stopped, removed, incomplete;
    unknown, if its job may not be read or its objects are malformed; unreadable, if its record is damaged or from
    another version."""
    why_short: str | None
    nodes: int
    processes_per_node: int
    world_size: int
    pods: list[PodStatus]
    restarts: int
    """Restarts of existing pods; those of deleted pods are not counted."""
    step: int | None
    max_steps: int | None
    loss: float | None
    val_loss: float | None
    tokens_per_second: float | None
    time_left: str | None
    exit_code: int | None
    """None until the run has ended."""
    launched_at: str
    age_sec: float
    unseen: str | None = None
    """What could not be read, and why."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


def run_status(cluster: Cluster, record: Record, *, with_log: bool = True, with_usage: bool = True) -> RunStatus:
    """The status of one run. Without its log, neither its step nor the end of a StatefulSet run is known."""
    with objects_of(cluster, record):
        return _run_status(cluster, record, with_log, with_usage)


@contextmanager
def objects_of(cluster: Cluster, record: Record) -> Iterator[None]:
    """Turn exceptions caused by malformed objects (anyone with write access to the namespace can create some) into an
    error of the run they belong to."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as problem:
        cause = redacted_line(f"{type(problem).__name__}: {problem}")
        raise UsageError(
            f"The objects of run '{record.run_id}' in namespace {record.namespace} are malformed ({cause}).",
            remedy=f"Inspect them: kubectl get all,{PLURALS[record.workload.kind]} -o yaml "
            f"-l {record.run_label}={record.run_id}{cluster.place(record.namespace)}",
        ) from problem


def _run_status(cluster: Cluster, record: Record, with_log: bool, with_usage: bool) -> RunStatus:
    job, pods = find_job(cluster, record), find_pods(cluster, record)
    usage = cluster.usage(record.namespace, record.selector) if with_usage and pods else None
    statuses = pod_statuses(record, pods, usage)
    unseen: list[str] = [warning] if (warning := unindexed_pods_warning(record, pods)) else []
    progress = rank_zero_progress(cluster, record, statuses, unseen) if with_log else None
    idle = idle_code(cluster, record, statuses, progress)
    events = find_events(cluster, record.namespace) if needs_events(record, job, statuses) else []
    queue, place = read_queue_state(cluster, record, job, statuses), cluster.place(record.namespace)
    status = make_status(record, Observation(job, statuses, progress, idle, events, queue, place))
    return replace(status, unseen=unseen[0]) if unseen else status


def all_status(cluster: Cluster, namespace: str | None) -> list[RunStatus]:
    """All runs of one namespace or of all, oldest first. Only logs of active runs are read. A problem with one run
    shows in its own status and does not hide the others."""
    entries = all_records(cluster, namespace)
    records = [record for record in entries if isinstance(record, Record)]
    if not records:
        return [_unreadable(each) for each in entries if isinstance(each, UnreadableRecord)]
    pods: dict[tuple[str, str], list[Object]] = defaultdict(list)
    for pod in cluster.find("v1", "Pod", namespace, _ALL_RUNS):
        if (run_id := run_id_of(pod)) is not None:
            pods[pod["metadata"]["namespace"], run_id].append(pod)
    unseen: dict[str, str] = {}
    jobs = _all_jobs(cluster, namespace, records, unseen)

    def observe(record: Record) -> Observation | UsageError:
        try:
            with objects_of(cluster, record):
                return Observation(jobs.get(_key(record)), pod_statuses(record, pods[_key(record)]))
        except UsageError as problem:
            return problem

    observed = {_key(record): observe(record) for record in records}
    events: list[Object] = []
    observations = ((record, observed[_key(record)]) for record in records)
    if any(needs_events(record, each.job, each.pods) for record, each in observations if isinstance(each, Observation)):
        events = find_events(cluster, namespace)

    def finish(record: Record | UnreadableRecord) -> RunStatus:
        if isinstance(record, UnreadableRecord):
            return _unreadable(record)
        each = observed[_key(record)]
        if isinstance(each, UsageError):
            return _malformed(record, each)
        try:
            with objects_of(cluster, record):
                return _finish(record, each)
        except UsageError as problem:
            return _malformed(record, problem)

    def _finish(record: Record, each: Observation) -> RunStatus:
        progress = rank_zero_progress(cluster, record, each.pods) if _is_active(record, each) else None
        idle = idle_code(cluster, record, each.pods, progress)
        queue, place = read_queue_state(cluster, record, each.job, each.pods), cluster.place(record.namespace)
        status = make_status(record, Observation(each.job, each.pods, progress, idle, events, queue, place))
        status = replace(status, unseen=unindexed_pods_warning(record, pods[_key(record)]))
        why = unseen.get(record.workload.kind)
        return replace(status, state="unknown", why_short=why) if why else status

    with ThreadPoolExecutor(MAX_PARALLEL_LOGS) as threads:
        return list(threads.map(finish, entries))


def _unreadable(record: UnreadableRecord) -> RunStatus:
    """The status of a run whose record cannot be read."""
    return RunStatus(
        run_id=record.run_id,
        namespace=record.namespace,
        kind="-",
        mode="-",
        state="unreadable",
        why_short=record.problem,
        nodes=0,
        processes_per_node=0,
        world_size=0,
        pods=[],
        restarts=0,
        step=None,
        max_steps=None,
        loss=None,
        val_loss=None,
        tokens_per_second=None,
        time_left=None,
        exit_code=None,
        launched_at=record.launched_at,
        age_sec=round(age_sec(record), 1),
    )


def _malformed(record: Record, problem: UsageError) -> RunStatus:
    """The status of a run whose record can be read but whose objects are malformed."""
    unknown = UnreadableRecord(record.run_id, record.namespace, redacted_line(problem.what), record.launched_at)
    return replace(_unreadable(unknown), kind=record.config.launch.kind, mode=record.work.mode, state="unknown")


def make_status(record: Record, observed: Observation) -> RunStatus:
    """Build the status from an observation, without requests to the cluster."""
    launch, progress = record.config.launch, observed.progress or RunProgress()
    state = find_state(record, observed)
    nodes = launch.node_range[1]
    return RunStatus(
        run_id=record.run_id,
        namespace=record.namespace,
        kind=launch.kind,
        mode=record.work.mode,
        state=state,
        why_short=explain_state(record, state, observed),
        nodes=nodes,
        processes_per_node=launch.processes_per_node,
        world_size=nodes * launch.processes_per_node,
        pods=observed.pods,
        restarts=sum(pod.restarts for pod in observed.pods),
        step=progress.step,
        max_steps=progress.max_steps or _steps_of(record),
        loss=progress.loss,
        val_loss=progress.val_loss,
        tokens_per_second=progress.tokens_per_second if state == "running" else None,
        time_left=progress.time_left if state == "running" else None,
        exit_code=find_exit_code(state, observed),
        launched_at=record.launched_at,
        age_sec=round(age_sec(record), 1),
    )


def find_job(cluster: Cluster, record: Record) -> Object | None:
    try:
        job = cluster.get(record.workload.api_version, record.workload.kind, record.run_id, record.namespace)
    except KindNotFound:  # the CRD was removed, and its jobs with it
        return None
    return job if job is not None and belongs_to_run(job, record.run_id) else None


def find_pods(cluster: Cluster, record: Record) -> list[Object]:
    return cluster.find("v1", "Pod", record.namespace, record.selector)


def read_queue_state(cluster: Cluster, record: Record, job: Object | None, pods: list[PodStatus]) -> QueueState:
    """The queue state from Kueue, if the run is queued."""
    return find_queue_state(cluster, record, job) if job is not None and is_queued(record, job, pods) else NOT_QUEUED


def needs_events(record: Record, job: Object | None, pods: list[PodStatus]) -> bool:
    """Whether events are needed to explain the state: the job is gone, or pods are missing."""
    if job is None:
        return all(pod.is_overdue for pod in pods) and not record.stopped_at
    return len(pods) < record.config.launch.node_range[1]


def rank_zero_progress(
    cluster: Cluster, record: Record, pods: list[PodStatus], unseen: list[str] | None = None
) -> RunProgress | None:
    """None if the log cannot be read; the reason is appended to `unseen`."""
    first = next((pod for pod in pods if pod.index == 0), None)
    if first is None or not first.has_run:
        return RunProgress()
    if first.silent_sec is not None:
        if unseen is not None:
            unseen.append(f"The log of {first.name} cannot be read: {first.node or 'its node'} is NotReady.")
        return None
    lines = _tail(cluster, record, first.name, TAIL_LINES, unseen=unseen)
    if lines is None:
        return None
    progress = read_progress(lines)
    if progress.step is None and first.last_exit_code is not None:  # it has just restarted
        earlier = read_progress(_tail(cluster, record, first.name, TAIL_LINES, previous=True) or [])
        return RunProgress(step=earlier.step, max_steps=earlier.max_steps, val_loss=earlier.val_loss)
    return progress


def idle_code(cluster: Cluster, record: Record, pods: list[PodStatus], progress: RunProgress | None) -> int | None:
    """Exit code of a StatefulSet run whose pods have all ended and wait to be deleted; None otherwise."""
    if record.config.launch.kind != "stateful_set" or len(pods) < record.config.launch.node_range[0]:
        return None
    if all(pod.final_code is not None for pod in pods):
        return worst_code(pod.final_code for pod in pods)
    # Pods of the first version never exit: they log their exit code and wait.
    if progress is None or progress.idle_code is None or not all(pod.is_running for pod in pods):
        return None

    def code(pod: PodStatus) -> int | None:
        return read_progress(_tail(cluster, record, pod.name, IDLE_LINES) or []).idle_code

    with ThreadPoolExecutor(MAX_PARALLEL_LOGS) as threads:
        codes = list(threads.map(code, pods))
    return None if None in codes else worst_code(codes)


def _tail(
    cluster: Cluster,
    record: Record,
    pod: str,
    count: int,
    previous: bool = False,
    unseen: list[str] | None = None,
) -> Iterable[str] | None:
    try:
        return list(cluster.log(pod, record.namespace, record.workload.container, tail=count, previous=previous))
    except LlmtrainError as problem:  # not allowed, or its node is NotReady
        if unseen is not None:
            unseen.append(problem.what)
        return None


def _all_jobs(
    cluster: Cluster, namespace: str | None, records: list[Record], unseen: dict[str, str]
) -> dict[tuple[str, str], Object]:
    """Jobs by run. `unseen` gets the kinds that may not be read, with the reason."""
    kinds = {(record.workload.api_version, record.workload.kind) for record in records}
    found = {}
    for api_version, kind in sorted(kinds):
        try:
            jobs = cluster.find(api_version, kind, namespace, _ALL_RUNS)
        except KindNotFound:  # the CRD was removed, and its jobs with it
            continue
        except UsageError as refused:  # runs of other kinds are still shown
            unseen[kind] = refused.what
            continue
        for job in jobs:
            meta = job["metadata"]
            if meta["name"] == run_id_of(job):  # Jobs inside a JobSet carry the label too
                found[kind, meta["namespace"], meta["name"]] = job
    return {_key(r): found[k] for r in records if (k := (r.workload.kind, *_key(r))) in found}


def _is_active(record: Record, observed: Observation) -> bool:
    return observed.job is not None and find_state(record, observed) not in ENDED and bool(observed.pods)


def _key(record: Record) -> tuple[str, str]:
    return record.namespace, record.run_id


def _steps_of(record: Record) -> int | None:
    trainer = record.config.trainer
    if record.work.mode != "train" or (trainer.max_steps is None and trainer.max_epochs is not None):
        return None
    return trainer.steps
