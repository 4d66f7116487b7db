"""Why a run does not do what it should: one cause, what shows it, and what to do."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from llmtrain.kubernetes.client import Cluster
from llmtrain.launch.record import Record
from llmtrain.operate.status.run_status import objects_of
from llmtrain.operate.why.causes import NO_TROUBLE, find_cause
from llmtrain.operate.why.diagnosis import Diagnosis
from llmtrain.operate.why.snapshot import Snapshot, look
from llmtrain.operate.why.stall import quiet_sec, watch_heartbeats
from llmtrain.terminal import printable_line

SILENT_SEC = 120.0


def diagnose(cluster: Cluster, record: Record, silent_sec: float) -> tuple[Snapshot, str, Diagnosis]:
    """What was seen, the cause's id, and what it tells. A run that says nothing for longer than `silent_sec` is looked
    at closer."""
    with objects_of(cluster, record):
        snapshot = look(cluster, record)
        cause, found = find_cause(snapshot)
        if cause in NO_TROUBLE and record.work.mode == "train" and (quiet := quiet_sec(cluster, snapshot)) > silent_sec:
            snapshot = replace(snapshot, silence=watch_heartbeats(cluster, snapshot, quiet))
            cause, found = find_cause(snapshot)
        return snapshot, cause, found


@dataclass(frozen=True)
class Why:
    run_id: str
    state: str
    cause: str
    """A stable id, see causes.py; `unknown` where none could be told."""
    what: str
    evidence: list[str]
    remedy: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def text(self) -> str:
        """For a person. Words of pods may hold anything: a terminal must not act on them."""
        lines = [self.what, "Evidence:", *(f"  {line}" for line in self.evidence), f"Remedy: {self.remedy}"]
        return "\n".join(printable_line(line) for line in lines)


def explain(cluster: Cluster, record: Record) -> Why:
    snapshot, cause, found = diagnose(cluster, record, SILENT_SEC)
    unseen = [f"Not seen: {what}" for what in (snapshot.status.unseen, *snapshot.hidden) if what]
    return Why(record.run_id, snapshot.status.state, cause, found.what, [*found.evidence, *unseen], found.remedy)
