"""llmtrain why: one cause, its evidence and a remedy."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from llmtrain.kubernetes.client import Cluster
from llmtrain.launch.record import Record
from llmtrain.operate.status.run_status import RunStatus, objects_of
from llmtrain.operate.why.causes import NO_PROBLEM, find_cause
from llmtrain.operate.why.diagnosis import Diagnosis
from llmtrain.operate.why.snapshot import Snapshot, Stall, take_snapshot
from llmtrain.operate.why.stall import log_age_sec, watch_heartbeats
from llmtrain.terminal import printable_line

STALL_AFTER_SEC = 120.0


def diagnose(cluster: Cluster, record: Record, stall_after_sec: float) -> tuple[Snapshot, str, Diagnosis]:
    """(Snapshot, id of the cause, diagnosis). Heartbeats are checked if the run shows no other problem, and has logged
    nothing for `stall_after_sec` or its log cannot be read."""
    with objects_of(cluster, record):
        snapshot = take_snapshot(cluster, record)
        cause, diagnosis = find_cause(snapshot)
        log_age = log_age_sec(cluster, snapshot) if _may_hang(record, cause) else 0.0
        if log_age is not None and log_age <= stall_after_sec:
            return snapshot, cause, diagnosis
        stall = watch_heartbeats(cluster, snapshot, log_age, stall_after_sec)
        if not stall.advancing_ranks:  # the run may have ended meanwhile, and its heartbeats with it
            snapshot = take_snapshot(cluster, record)
            cause, diagnosis = find_cause(snapshot)
        if _may_hang(record, cause):
            snapshot = _with_stall(snapshot, stall)
            cause, diagnosis = find_cause(snapshot)
        return snapshot, cause, diagnosis


def _may_hang(record: Record, cause: str) -> bool:
    return cause in NO_PROBLEM and record.work.mode == "train"


def _with_stall(snapshot: Snapshot, stall: Stall) -> Snapshot:
    is_unknown = stall.seconds is None and stall.error
    unreadable = [f"Heartbeats cannot be read: {stall.error}"] if is_unknown else []
    status = _with_step(snapshot.status, stall)
    return replace(snapshot, stall=stall, status=status, unreadable=[*snapshot.unreadable, *unreadable])


def _with_step(status: RunStatus, stall: Stall) -> RunStatus:
    """The step of the heartbeats, if no log showed one."""
    return status if status.step is not None or not stall.steps else replace(status, step=min(stall.steps.values()))


@dataclass(frozen=True)
class Why:
    run_id: str
    state: str
    cause: str
    """A stable id, see causes.py; `unknown` if none was found."""
    what: str
    evidence: list[str]
    remedy: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def text(self) -> str:
        """For a terminal: messages of pods may contain control characters."""
        lines = [self.what, "Evidence:", *(f"  {line}" for line in self.evidence), f"Remedy: {self.remedy}"]
        return "\n".join(printable_line(line) for line in lines)


def explain(cluster: Cluster, record: Record) -> Why:
    snapshot, cause, diagnosis = diagnose(cluster, record, STALL_AFTER_SEC)
    warnings = [f"Warning: {text}" for text in (snapshot.status.unseen, *snapshot.unreadable) if text]
    evidence = [*diagnosis.evidence, *warnings]
    return Why(record.run_id, snapshot.status.state, cause, diagnosis.what, evidence, diagnosis.remedy)
