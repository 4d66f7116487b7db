"""What `why` looks at: a run's job, pods, events and how its containers ended. All questions to the cluster are asked
here; the causes only read the answers."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.launch.record import Record
from llmtrain.launch.workloads.job_set import JOB_NAME
from llmtrain.operate.status.container_exits import ContainerExit, exits_from_events, histories, in_time, with_lines
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

TAIL_LINES = 200  # of a container that has ended: an error, and a traceback before it
LOGS_READ = 16  # of the worst exits: what one says, the others of its kind say too
UNREACHABLE = 69  # the code of processes that did not find each other
_OWN_SERVICE = ("indexed_job", "stateful_set")  # the operators of other kinds make their own
_ENDS_DO_NOT_MATTER = ("running", "finished", "stopped", "removed", "incomplete")


@dataclass(frozen=True)
class Stall:
    """A run that says nothing: for how long, and what the heartbeats on its volume tell. None: they cannot be read."""

    seconds: float
    dead: list[int] | None = None
    """Ranks whose heart has stopped."""
    moving: list[int] = field(default_factory=list)
    """Ranks that made progress while we watched."""
    steps: dict[int, int] = field(default_factory=dict)
    problem: str = ""
    """Why they cannot be read."""


@dataclass(frozen=True)
class Snapshot:
    record: Record
    status: RunStatus
    job: Object | None = None
    conditions: list[Object] = field(default_factory=list)
    """Of the job, and of the Job inside it where there is one, that are true."""
    pods: list[tuple[PodStatus, Object]] = field(default_factory=list)
    """The newest of each node."""
    exits: list[ContainerExit] = field(default_factory=list)
    """How each node ended last, first one first, where that belongs together."""
    gave_up: str | None = None
    """llmtrain's own word that it does not try again."""
    events: list[Object] = field(default_factory=list)
    """Of this run."""
    claims: dict[str, str] = field(default_factory=dict)
    """Claim -> its phase, or `missing`; looked at only while pods wait."""
    has_service: bool | None = None
    """Whether the Service is there by which pods find node 0; looked at only where they did not. None: not known."""
    usage: dict[str, str] = field(default_factory=dict)
    """Pod -> memory it uses now."""
    hidden: list[str] = field(default_factory=list)
    """What we may not see, in words."""
    silence: Stall | None = None
    queue: QueueState = NOT_QUEUED
    place: str = ""
    """Options that name namespace and cluster, for commands that can be typed."""

    @property
    def run(self) -> str:
        return f"{self.record.run_id}{self.place}"

    @property
    def wanted(self) -> int:
        """Pods that there should be."""
        return self.record.config.launch.node_range[1]

    @property
    def is_active(self) -> bool:
        return self.status.state not in (*ENDED, "suspended", "stopping")

    @property
    def is_running(self) -> bool:
        return self.status.state == "running"

    @property
    def is_held_up(self) -> bool:
        """It goes on, or should, and does not train. An elastic run trains while some of its pods wait."""
        return self.is_active and not self.is_running

    def about(self, *reasons: str) -> list[Object]:
        """Events for one of these reasons, newest first."""
        return sorted((e for e in self.events if e.get("reason") in reasons), key=event_time, reverse=True)


def look(cluster: Cluster, record: Record) -> Snapshot:
    """Everything but heartbeats, which cost a pod."""
    hidden: list[str] = []
    job, raw = find_job(cluster, record), find_pods(cluster, record)
    statuses = pod_statuses(record, raw, cluster.usage(record.namespace, record.selector) if raw else None)
    progress = rank_zero_progress(cluster, record, statuses)
    events = _events(cluster, record, hidden)
    queue = read_queue_state(cluster, record, job, statuses)
    hidden += [queue.unseen] if queue.unseen else []
    place = cluster.place(record.namespace)
    seen = Observation(job, statuses, progress, idle_code(cluster, record, statuses, progress), events, queue, place)
    status = replace(make_status(record, seen), unseen=unindexed_pods_warning(record, raw))
    nodes, claims = by_index(record, raw), claim_names(record)
    exits: list[ContainerExit] = []
    gave_up = None
    if status.state not in _ENDS_DO_NOT_MATTER:
        exits, gave_up = _exits(cluster, record, nodes, hidden)
        if record.config.launch.kind == "pytorch_job" and not exits:
            exits = exits_from_events(record, job, (event for event in events if is_about(record, event)))
        if needs_run_reports(record, job, exits):
            exits = add_run_reports(cluster, record, job, exits)
    if progress is None and not exits:
        hidden.append("Its log cannot be read.")
    return Snapshot(
        record=record,
        status=status,
        job=job,
        conditions=_conditions(cluster, record, job, any(pod.phase == "Terminating" for pod in statuses)),
        pods=[(pod, nodes[pod.index][-1]) for pod in statuses],
        exits=exits,
        gave_up=gave_up,
        events=[event for event in events if _is_ours(record, event, claims)],
        claims=_claim_phases(cluster, record, claims) if _some_wait(record, job, statuses) else {},
        has_service=_has_service(cluster, record) if any(end.code == UNREACHABLE for end in exits) else None,
        usage={pod.name: pod.memory for pod in statuses if pod.memory},
        hidden=hidden,
        queue=queue,
        place=place,
    )


def _some_wait(record: Record, job: Object | None, pods: list[PodStatus]) -> bool:
    is_short = len(pods) < record.config.launch.node_range[1]
    return job is not None and (is_short or any(pod.phase == "Pending" for pod in pods))


def _events(cluster: Cluster, record: Record, hidden: list[str]) -> list[Object]:
    try:
        return cluster.find("v1", "Event", record.namespace)
    except UsageError as refused:
        hidden.append(refused.what)
        return []


def claim_names(record: Record) -> dict[str, str]:
    """Volume -> its claim."""
    plan = record.plan
    return {volume: plan.claim(volume) for volume in record.config.launch.volumes}


def _is_ours(record: Record, event: Object, claims: dict[str, str]) -> bool:
    """Of its job and pods, its claims, and what Kueue makes of it."""
    about = event.get("involvedObject") or {}
    name = str(about.get("name", ""))
    return (
        is_about(record, event)
        or (about.get("kind") == "PersistentVolumeClaim" and name in claims.values())
        or (about.get("kind") == "Workload" and name.startswith(f"{record.workload.kind.lower()}-{record.run_id}-"))
    )


def _conditions(cluster: Cluster, record: Record, job: Object | None, some_leave: bool) -> list[Object]:
    rows = _true_conditions(job)
    has_inner = job is not None and record.config.launch.kind in ("job_set", "train_job")
    if has_inner and (some_leave or any(row["type"] == "Failed" for row in rows)):
        try:  # the outer one only says that the inner one failed, and only once its pods have ended
            inner = cluster.get("batch/v1", "Job", f"{record.run_id}-{JOB_NAME}-0", record.namespace)
        except LlmtrainError:
            inner = None
        rows += _true_conditions(inner)
    return rows


def _true_conditions(job: Object | None) -> list[Object]:
    rows = ((job or {}).get("status") or {}).get("conditions") or []
    return [row for row in rows if row.get("status") == "True"]


def _claim_phases(cluster: Cluster, record: Record, claims: dict[str, str]) -> dict[str, str]:
    found = {}
    for name in claims.values():
        try:
            claim = cluster.get("v1", "PersistentVolumeClaim", name, record.namespace)
        except LlmtrainError:  # no right to look
            continue
        found[name] = "missing" if claim is None else str((claim.get("status") or {}).get("phase") or "")
    return found


def _has_service(cluster: Cluster, record: Record) -> bool | None:
    """None where another than we makes it, or we may not look."""
    if record.config.launch.kind not in _OWN_SERVICE:
        return None
    try:
        return cluster.get("v1", "Service", record.plan.service, record.namespace) is not None
    except LlmtrainError:
        return None


def _exits(
    cluster: Cluster, record: Record, nodes: dict[int, list[Object]], hidden: list[str]
) -> tuple[list[ContainerExit], str | None]:
    """How each node ended last. Where llmtrain has given up after some crashes, those are what it was for."""
    nodes_ends = histories(record, nodes)
    if record.config.launch.kind == "stateful_set":
        _add_idle(cluster, record, nodes_ends)
    heads = _read(cluster, record, in_time(record, [own[0] for own in nodes_ends if own]), hidden)
    given_up = next((end.report for end in heads if end.report and end.report.reason == "gave_up"), None)
    if given_up is None:
        return heads, None
    earlier = [next((end for end in own if end.code != 65), None) for own in nodes_ends]
    before = _read(cluster, record, in_time(record, [end for end in earlier if end]), hidden)
    return before or heads, given_up.message


def _add_idle(cluster: Cluster, record: Record, nodes_ends: list[list[ContainerExit]]) -> None:
    """Pods of a StatefulSet do not end: they say that they have, and wait."""

    def look_at(own: list[ContainerExit]) -> None:
        if not own or not own[0].is_going:
            return
        going = own.pop(0)
        lines = _lines(cluster, record, going) or ()
        code = read_progress(lines).idle_code
        if code:
            own.insert(0, going.idling(code, lines))

    with ThreadPoolExecutor(MAX_PARALLEL_LOGS) as threads:
        list(threads.map(look_at, nodes_ends))


def _read(cluster: Cluster, record: Record, exits: Iterable[ContainerExit], hidden: list[str]) -> list[ContainerExit]:
    """With the logs of the worst of them."""
    ordered = sorted(exits, key=lambda end: end.severity)

    def read(end: ContainerExit) -> ContainerExit:
        return end if end.report and end.report.error else with_lines(end, end.lines or _lines(cluster, record, end))

    with ThreadPoolExecutor(MAX_PARALLEL_LOGS) as threads:
        done = [*threads.map(read, ordered[:LOGS_READ]), *ordered[LOGS_READ:]]
    if any(end.is_unreadable for end in done) and "Logs cannot be read." not in hidden:
        hidden.append("Logs cannot be read.")
    return sorted(done, key=lambda end: (end.at or "9", end.index))


def _lines(cluster: Cluster, record: Record, end: ContainerExit) -> tuple[str, ...] | None:
    try:
        return tuple(cluster.log(end.pod, record.namespace, end.container, tail=TAIL_LINES, previous=end.is_previous))
    except LlmtrainError:  # no right to it, or its machine does not answer
        return None
