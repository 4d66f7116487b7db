"""How runs do: one of them, or all, with few questions to the cluster."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.kubernetes.api_errors import KindNotFound, one_line
from llmtrain.kubernetes.client import PLURALS, Cluster, Labels, Object
from llmtrain.kubernetes.labels import APP_LABEL, belongs_to_run, run_id_of
from llmtrain.launch.record import Record, UnreadableRecord, all_records
from llmtrain.operate.status.events import find_events
from llmtrain.operate.status.pods import PodStatus, pod_statuses, strange_pods, worst_code
from llmtrain.operate.status.progress import RunProgress, read_progress
from llmtrain.operate.status.queue import NOT_QUEUED, QueueState, find_queue_state
from llmtrain.operate.status.state import (
    ENDED,
    Seen,
    age_sec,
    explain_state,
    find_exit_code,
    find_state,
    wants_queue_state,
)

TAIL_LINES = 400  # of rank 0's log: enough to hold a step, whatever else it says
IDLE_LINES = 5  # of a pod that waits: the mark is its last line
AT_ONCE = 16  # logs that are asked for at the same time
_ALL_RUNS: Labels = {**APP_LABEL}


@dataclass(frozen=True)
class RunStatus:
    run_id: str
    namespace: str
    kind: str
    mode: str
    state: str
    """pending, starting, running, restarting, suspended, stopping; finished, failed, stopped, removed, incomplete; or
    unknown, where we may not see its job, or its objects are not as Kubernetes makes them; unreadable, where its record
    is damaged, or of another version."""
    why_short: str | None
    nodes: int
    processes_per_node: int
    world_size: int
    pods: list[PodStatus]
    restarts: int
    """Those that can still be seen: pods that were deleted are forgotten."""
    step: int | None
    max_steps: int | None
    loss: float | None
    val_loss: float | None
    tokens_per_second: float | None
    time_left: str | None
    exit_code: int | None
    """Of a run that has ended."""
    launched_at: str
    age_sec: float
    unseen: str | None = None
    """What could not be looked at, and why."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


def run_status(cluster: Cluster, record: Record, *, with_log: bool = True, with_usage: bool = True) -> RunStatus:
    """One run. Without its log, neither its step nor the end of a StatefulSet is known."""
    with objects_of(cluster, record):
        return _run_status(cluster, record, with_log, with_usage)


@contextmanager
def objects_of(cluster: Cluster, record: Record) -> Iterator[None]:
    """Objects that are not as Kubernetes makes them (whoever may write in the namespace can make some) are an error of
    the run that they belong to, not a traceback."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as problem:
        said = one_line(f"{type(problem).__name__}: {problem}")
        raise UsageError(
            f"The objects of run '{record.run_id}' in namespace {record.namespace} cannot be understood ({said}).",
            remedy=f"Look at them: kubectl get all,{PLURALS[record.workload.kind]} -o yaml "
            f"-l {record.run_label}={record.run_id}{cluster.place(record.namespace)}",
        ) from problem


def _run_status(cluster: Cluster, record: Record, with_log: bool, with_usage: bool) -> RunStatus:
    job, pods = find_job(cluster, record), find_pods(cluster, record)
    usage = cluster.usage(record.namespace, record.selector) if with_usage and pods else None
    statuses = pod_statuses(record, pods, usage)
    unseen: list[str] = [strange] if (strange := strange_pods(record, pods)) else []
    progress = rank_zero_progress(cluster, record, statuses, unseen) if with_log else None
    idle = idle_code(cluster, record, statuses, progress)
    events = find_events(cluster, record.namespace) if wants_events(record, job, statuses) else []
    queue, place = look_at_queue(cluster, record, job, statuses), cluster.place(record.namespace)
    status = make_status(record, Seen(job, statuses, progress, idle, events, queue, place))
    return replace(status, unseen=unseen[0]) if unseen else status


def all_status(cluster: Cluster, namespace: str | None) -> list[RunStatus]:
    """All runs of a namespace, or of all, oldest first. Logs are read of those that are going on. What is wrong with
    one run is said in its row, and hides no other."""
    found = all_records(cluster, namespace)
    records = [record for record in found if isinstance(record, Record)]
    if not records:
        return [_unreadable(each) for each in found if isinstance(each, UnreadableRecord)]
    pods: dict[tuple[str, str], list[Object]] = defaultdict(list)
    for pod in cluster.find("v1", "Pod", namespace, _ALL_RUNS):
        if (run_id := run_id_of(pod)) is not None:
            pods[pod["metadata"]["namespace"], run_id].append(pod)
    unseen: dict[str, str] = {}
    jobs = _all_jobs(cluster, namespace, records, unseen)

    def look(record: Record) -> Seen | UsageError:
        try:
            with objects_of(cluster, record):
                return Seen(jobs.get(_key(record)), pod_statuses(record, pods[_key(record)]))
        except UsageError as problem:
            return problem

    seen = {_key(record): look(record) for record in records}
    events: list[Object] = []
    looked = ((record, seen[_key(record)]) for record in records)
    if any(wants_events(record, each.job, each.pods) for record, each in looked if isinstance(each, Seen)):
        events = find_events(cluster, namespace)

    def finish(record: Record | UnreadableRecord) -> RunStatus:
        if isinstance(record, UnreadableRecord):
            return _unreadable(record)
        each = seen[_key(record)]
        if isinstance(each, UsageError):
            return _not_understood(record, each)
        try:
            with objects_of(cluster, record):
                return _finish(record, each)
        except UsageError as problem:
            return _not_understood(record, problem)

    def _finish(record: Record, each: Seen) -> RunStatus:
        progress = rank_zero_progress(cluster, record, each.pods) if _is_going(record, each) else None
        idle = idle_code(cluster, record, each.pods, progress)
        queue, place = look_at_queue(cluster, record, each.job, each.pods), cluster.place(record.namespace)
        status = make_status(record, Seen(each.job, each.pods, progress, idle, events, queue, place))
        status = replace(status, unseen=strange_pods(record, pods[_key(record)]))
        why = unseen.get(record.workload.kind)
        return replace(status, state="unknown", why_short=why) if why else status

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(finish, found))


def _unreadable(record: UnreadableRecord) -> RunStatus:
    """The row of a run of which nothing is known but its name."""
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


def _not_understood(record: Record, problem: UsageError) -> RunStatus:
    """The row of a run whose record can be read, and whose objects cannot."""
    unknown = UnreadableRecord(record.run_id, record.namespace, one_line(problem.what), record.launched_at)
    return replace(_unreadable(unknown), kind=record.config.launch.kind, mode=record.work.mode, state="unknown")


def make_status(record: Record, seen: Seen) -> RunStatus:
    """The status from what was found; asks nothing."""
    launch, progress = record.config.launch, seen.progress or RunProgress()
    state = find_state(record, seen)
    nodes = launch.node_range[1]
    return RunStatus(
        run_id=record.run_id,
        namespace=record.namespace,
        kind=launch.kind,
        mode=record.work.mode,
        state=state,
        why_short=explain_state(record, state, seen),
        nodes=nodes,
        processes_per_node=launch.processes_per_node,
        world_size=nodes * launch.processes_per_node,
        pods=seen.pods,
        restarts=sum(pod.restarts for pod in seen.pods),
        step=progress.step,
        max_steps=progress.max_steps or _steps_of(record),
        loss=progress.loss,
        val_loss=progress.val_loss,
        tokens_per_second=progress.tokens_per_second if state == "running" else None,
        time_left=progress.time_left if state == "running" else None,
        exit_code=find_exit_code(state, seen),
        launched_at=record.launched_at,
        age_sec=round(age_sec(record), 1),
    )


def find_job(cluster: Cluster, record: Record) -> Object | None:
    try:
        job = cluster.get(record.workload.api_version, record.workload.kind, record.run_id, record.namespace)
    except KindNotFound:  # its operator was removed, and its jobs with it
        return None
    return job if job is not None and belongs_to_run(job, record.run_id) else None


def find_pods(cluster: Cluster, record: Record) -> list[Object]:
    return cluster.find("v1", "Pod", record.namespace, record.selector)


def look_at_queue(cluster: Cluster, record: Record, job: Object | None, pods: list[PodStatus]) -> QueueState:
    """What Kueue says, where the run waits for it."""
    is_asked = job is not None and wants_queue_state(record, job, pods)
    return find_queue_state(cluster, record, job) if job is not None and is_asked else NOT_QUEUED


def wants_events(record: Record, job: Object | None, pods: list[PodStatus]) -> bool:
    """Whether the rest leaves a question open: where the job is gone, or pods are not made."""
    if job is None:
        return all(pod.is_overdue for pod in pods) and not record.stopped_at
    return len(pods) < record.config.launch.node_range[1]


def rank_zero_progress(
    cluster: Cluster, record: Record, pods: list[PodStatus], unseen: list[str] | None = None
) -> RunProgress | None:
    """None where the log cannot be read; why is put into `unseen`."""
    first = next((pod for pod in pods if pod.index == 0), None)
    if first is None or not first.has_run:
        return RunProgress()
    if first.silent_sec is not None:
        if unseen is not None:
            unseen.append(f"The log of {first.name}: {first.node or 'its machine'} does not answer.")
        return None
    lines = _tail(cluster, record, first.name, TAIL_LINES, unseen=unseen)
    if lines is None:
        return None
    progress = read_progress(lines)
    if progress.step is None and first.last_exit_code is not None:  # it was started again just now
        earlier = read_progress(_tail(cluster, record, first.name, TAIL_LINES, previous=True) or [])
        return RunProgress(step=earlier.step, max_steps=earlier.max_steps, val_loss=earlier.val_loss)
    return progress


def idle_code(cluster: Cluster, record: Record, pods: list[PodStatus], progress: RunProgress | None) -> int | None:
    """What a StatefulSet's run has ended with: every one of its pods says so and waits. None where it goes on."""
    if record.config.launch.kind != "stateful_set" or len(pods) < record.config.launch.node_range[0]:
        return None
    if all(pod.final_code is not None for pod in pods):
        return worst_code(pod.final_code for pod in pods)
    # Images of the first version never exit: their log says that they wait.
    if progress is None or progress.idle_code is None or not all(pod.is_running for pod in pods):
        return None

    def code(pod: PodStatus) -> int | None:
        return read_progress(_tail(cluster, record, pod.name, IDLE_LINES) or []).idle_code

    with ThreadPoolExecutor(AT_ONCE) as threads:
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
    except LlmtrainError as problem:  # no right to it, or its machine does not answer
        if unseen is not None:
            unseen.append(problem.what)
        return None


def _all_jobs(
    cluster: Cluster, namespace: str | None, records: list[Record], unseen: dict[str, str]
) -> dict[tuple[str, str], Object]:
    """Jobs by run. Kinds that we may not look at are put into `unseen`, with the reason."""
    kinds = {(record.workload.api_version, record.workload.kind) for record in records}
    found = {}
    for api_version, kind in sorted(kinds):
        try:
            jobs = cluster.find(api_version, kind, namespace, _ALL_RUNS)
        except KindNotFound:  # its operator was removed, and its jobs with it
            continue
        except UsageError as refused:  # of the others something can be said all the same
            unseen[kind] = refused.what
            continue
        for job in jobs:
            meta = job["metadata"]
            if meta["name"] == run_id_of(job):  # Jobs inside a JobSet carry the label too
                found[kind, meta["namespace"], meta["name"]] = job
    return {_key(r): found[k] for r in records if (k := (r.workload.kind, *_key(r))) in found}


def _is_going(record: Record, seen: Seen) -> bool:
    return seen.job is not None and find_state(record, seen) not in ENDED and bool(seen.pods)


def _key(record: Record) -> tuple[str, str]:
    return record.namespace, record.run_id


def _steps_of(record: Record) -> int | None:
    trainer = record.config.trainer
    if record.work.mode != "train" or (trainer.max_steps is None and trainer.max_epochs is not None):
        return None
    return trainer.steps
