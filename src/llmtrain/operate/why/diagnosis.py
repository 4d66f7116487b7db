"""The result of a cause: a summary, its evidence and a remedy; and the texts that several causes share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from llmtrain.operate.status.container_exits import ContainerExit
from llmtrain.operate.status.state import MEANING
from llmtrain.operate.why.snapshot import Snapshot

MAX_LISTED = 8  # pods or ranks in a message


@dataclass(frozen=True)
class Diagnosis:
    what: str
    evidence: list[str] = field(default_factory=list)
    remedy: str = ""
    hung_pods: tuple[str, ...] = ()
    """Pods with a hung process, which does not exit: `recover` deletes them."""


@dataclass(frozen=True)
class Cause:
    id: str
    """Stable: scripts read it."""
    find: Callable[[Snapshot], Diagnosis | None]
    """None if this is not the cause. Sends no request to the cluster."""


def resume_command(snapshot: Snapshot, *settings: str) -> str:
    """The command that resumes the run with these settings; an active run is stopped first."""
    resume = " ".join([f"llmtrain resume {snapshot.run}", *(f"--set {setting}" for setting in settings)])
    return resume if snapshot.status.has_ended else f"llmtrain stop {snapshot.run}, then {resume}"


def restart_note(snapshot: Snapshot) -> str:
    """How the run continues after an exit that a restart can fix."""
    if snapshot.status.state == "failed":
        return f"Resume the run: {resume_command(snapshot)}."
    return "The pods are restarted automatically, and the run resumes from its newest checkpoint."


def exit_with_code(snapshot: Snapshot, *codes: int) -> ContainerExit | None:
    """The exit with one of these codes that is best documented: with a report, of the lowest pod."""
    exits = [each for each in snapshot.exits if each.code in codes]
    return min(exits, key=lambda each: (each.report is None, each.index), default=None)


def report_message(exit_: ContainerExit) -> str | None:
    return exit_.report.message if exit_.report else None


def exit_code_text(exit_: ContainerExit) -> str:
    """For an exit without a report."""
    return f"{exit_.label} ended with exit code {exit_.code}: {MEANING.get(exit_.code, 'a crash')}."


def exit_evidence(snapshot: Snapshot, exit_: ContainerExit, message: str | None) -> list[str]:
    return [exit_.text, *([f"Its error: {message}"] if message else []), *other_exits(snapshot, [exit_])]


def other_exits(snapshot: Snapshot, shown: list[ContainerExit]) -> list[str]:
    """One line for all exits that are not in `shown`, and one if llmtrain stopped restarting the run."""
    rest = [each for each in snapshot.exits if each not in shown]
    codes = [f"pod {each.index}: {each.code}" for each in rest[:MAX_LISTED]]
    more = ", ..." if len(rest) > MAX_LISTED else ""
    lines = [f"Exit codes of the other pods: {', '.join(codes)}{more}."] if rest else []
    is_new = snapshot.gave_up and all(report_message(each) != snapshot.gave_up for each in shown)
    return [*lines, f"llmtrain then gave up: {snapshot.gave_up}"] if is_new else lines


def remedy_with_resume(snapshot: Snapshot, exit_: ContainerExit, default: str, with_settings: bool = False) -> str:
    """The remedy of the error, or `default`, and the command to resume. `with_settings`: the config may be at fault."""
    remedy = (exit_.report.remedy if exit_.report else None) or default
    if f"resume {snapshot.record.run_id}" in remedy:
        return remedy
    settings = ", with --set FIELD=VALUE to change the config" if with_settings else ""
    return f"{remedy} Then: {resume_command(snapshot)}{settings}."
