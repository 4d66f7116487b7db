"""What a cause tells: one sentence, what it was seen by, and what to do."""

from collections.abc import Callable
from dataclasses import dataclass, field

from llmtrain.operate.status.container_exits import ContainerExit
from llmtrain.operate.status.state import MEANING
from llmtrain.operate.why.snapshot import Snapshot


@dataclass(frozen=True)
class Diagnosis:
    what: str
    evidence: list[str] = field(default_factory=list)
    remedy: str = ""
    frozen: tuple[str, ...] = ()
    """Pods with a process that hangs and does not end by itself: `recover` deletes them."""


@dataclass(frozen=True)
class Cause:
    id: str
    """Stable: scripts read it."""
    find: Callable[[Snapshot], Diagnosis | None]
    """None where it is something else. Asks nothing of the cluster."""


def go_on(snapshot: Snapshot, *changes: str) -> str:
    """The command that goes on with the run, changed; one that is still going is stopped first."""
    again = " ".join([f"llmtrain resume {snapshot.run}", *(f"--set {change}" for change in changes)])
    return again if snapshot.status.has_ended else f"llmtrain stop {snapshot.run}, then {again}"


def with_code(snapshot: Snapshot, *codes: int) -> ContainerExit | None:
    """Of node 0 before others: it says most."""
    found = [end for end in snapshot.exits if end.code in codes]
    return min(found, key=lambda end: (end.report is None, end.index), default=None)


def message_of(end: ContainerExit) -> str | None:
    return end.report.message if end.report else None


def code_only(end: ContainerExit) -> str:
    return f"{end.pod} (node {end.index}) ended with exit code {end.code}: {MEANING.get(end.code, 'a crash')}."


def evidence_of(snapshot: Snapshot, end: ContainerExit, said: str | None) -> list[str]:
    return [end.text, *([f"It said: {said}"] if said else []), *others(snapshot, [end])]


def others(snapshot: Snapshot, told: list[ContainerExit]) -> list[str]:
    """In one line: with many nodes they all say the same. And that llmtrain gave up, where nobody else says so."""
    rest = [end for end in snapshot.exits if end not in told]
    codes = [f"node {end.index}: {end.code}" for end in rest[:8]]
    lines = [f"The others ended with: {', '.join(codes)}{', ...' if len(rest) > 8 else ''}."] if rest else []
    is_new = snapshot.gave_up and all(message_of(end) != snapshot.gave_up for end in told)
    return [*lines, f"Then llmtrain gave up: {snapshot.gave_up}"] if is_new else lines


def remedy_of(snapshot: Snapshot, end: ContainerExit, usual: str, may_change: bool = False) -> str:
    """The error's own, where it has one. `may_change`: it may take another config."""
    own = (end.report.remedy if end.report else None) or usual
    changed = ", with --set FIELD=VALUE for what changes in the config" if may_change else ""
    return own if f"resume {snapshot.record.run_id}" in own else f"{own} Then: {go_on(snapshot)}{changed}."


def again(snapshot: Snapshot) -> str:
    if snapshot.status.state == "failed":
        return f"Go on: {go_on(snapshot)}."
    return "The platform starts it again, and it goes on from its newest checkpoint."
