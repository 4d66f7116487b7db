"""`llmtrain why`: the types Cause and Diagnosis (a summary, its evidence, a remedy), and texts that causes share."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from llmtrain.core.redact import redacted_line
from llmtrain.operate.status.container_exits import ContainerExit
from llmtrain.operate.status.state import exit_meaning
from llmtrain.operate.why.snapshot import Snapshot
from llmtrain.runs.state import RunState

MAX_LISTED = 8  # pods or ranks in a message
_TRACEBACK = "Traceback (most recent call last):"


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
    states: Collection[str] = tuple(RunState)
    """States of the run in which it may be the cause."""


def resume_command(snapshot: Snapshot, *settings: str) -> str:
    """The command that resumes the run with these settings; an active run is stopped first."""
    command = f"llmtrain resume {snapshot.run}"
    for setting in settings:
        command += f" --set {setting}"
    if snapshot.status.has_ended:
        return command
    return f"llmtrain stop {snapshot.run}, then {command}"


def restart_note(snapshot: Snapshot) -> str:
    """How the run continues after an exit that a restart can fix."""
    if snapshot.status.state == RunState.FAILED:
        return f"Resume the run: {resume_command(snapshot)}."
    return "The pods are restarted automatically, and the run resumes from its newest checkpoint."


def exit_with_code(snapshot: Snapshot, *codes: int) -> ContainerExit | None:
    """The exit with one of these codes that is best documented: with a report, of the lowest pod."""
    exits = [each for each in snapshot.exits if each.code in codes]
    return min(exits, key=lambda each: (each.report is None, each.index), default=None)


def with_message(what: str, message: str | None) -> str:
    return f"{what}: {message}" if message else f"{what}."


def with_node(pod: str, node: str | None) -> str:
    return f"{pod} on {node}" if node else pod


def listed(names: Sequence[object], most: int = MAX_LISTED) -> str:
    """The first names, and `...` if there are more."""
    shown = [str(name) for name in names[:most]]
    if len(names) > most:
        shown.append("...")
    return ", ".join(shown)


def report_message(exit_: ContainerExit) -> str | None:
    return exit_.report.message if exit_.report else None


def exit_code_text(exit_: ContainerExit) -> str:
    """For an exit without a report."""
    return f"{exit_.label} ended with exit code {exit_.code}: {exit_meaning(exit_.code) or 'a crash'}."


def exit_evidence(snapshot: Snapshot, exit_: ContainerExit, message: str | None) -> list[str]:
    lines = [exit_.text]
    if message:
        lines.append(f"Its error: {message}")
    return lines + other_exits(snapshot, [exit_])


def other_exits(snapshot: Snapshot, shown: list[ContainerExit]) -> list[str]:
    """One line for all exits that are not in `shown`, and one if llmtrain stopped restarting the run."""
    lines = []
    codes = [f"pod {each.index}: {each.code}" for each in snapshot.exits if each not in shown]
    if codes:
        lines.append(f"Exit codes of the other pods: {listed(codes)}.")
    if snapshot.gave_up and all(report_message(each) != snapshot.gave_up for each in shown):
        lines.append(f"llmtrain then gave up: {snapshot.gave_up}")
    return lines


def remedy_with_resume(snapshot: Snapshot, exit_: ContainerExit, default: str, with_settings: bool = False) -> str:
    """The remedy of the error, or `default`, and the command to resume. `with_settings`: the config may be at fault."""
    remedy = default
    if exit_.report and exit_.report.remedy:
        remedy = exit_.report.remedy
    if f"resume {snapshot.record.run_id}" in remedy:  # it has the command already
        return remedy
    command = resume_command(snapshot)
    if with_settings:
        command += ", with --set FIELD=VALUE to change the config"
    return f"{remedy} Then: {command}."


def traceback_end(lines: Sequence[str]) -> str | None:
    """The exception of the last Python traceback in a log: `ValueError: what`."""
    starts = [number for number, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    if not starts:
        return None
    start = starts[-1]
    prefix = lines[start].removesuffix(_TRACEBACK)  # torchrun prefixes lines with `[rank0]: `
    for line in lines[start + 1 :]:
        text = line.removeprefix(prefix)
        if text.strip() and not text.startswith(" "):  # frames and their source are indented
            return redacted_line(text)
    return None


def last_line(lines: Sequence[str]) -> str | None:
    for line in reversed(lines):
        if line.strip():
            return redacted_line(line)
    return None
