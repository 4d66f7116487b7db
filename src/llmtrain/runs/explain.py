"""Why a local run is in the state it is in: one cause, its evidence and a remedy. Also the type of an explanation, for
runs on a cluster too (operate/why)."""

from dataclasses import asdict, dataclass
from typing import Any

from llmtrain.core.terminal import printable_line
from llmtrain.runs.exit_report import ExitReport
from llmtrain.runs.json_values import short_text
from llmtrain.runs.state import RunState
from llmtrain.runs.view import RankView, RunView

SILENT_AFTER_SEC = 30.0
"""A rank without a heartbeat for this long stands out; heartbeats are written every two seconds."""
HEALTHY = ("finished", "healthy", "not_started")
"""Causes of a local run with which nothing is wrong."""
_MAX_RANKS_NAMED = 8
_MAX_RANKS_SHOWN = 4
_MAX_CAUSE = 80
_MAX_TIME = 40


@dataclass(frozen=True)
class Why:
    run_id: str
    state: str
    cause: str
    """A stable id, see docs/troubleshooting.md; `unknown` if none was found."""
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


def explain_local(view: RunView) -> Why:
    """The cause of a run directory's state."""
    if view.state == RunState.RUNNING:
        silent = [rank for rank in view.ranks() if rank.age > SILENT_AFTER_SEC]
        return _why_silent(view, silent) if silent else _why_running(view)
    if view.state == RunState.FINISHED:
        evidence = [f"finished.json exists; the run ended at step {view.step}."]
        return _why(view, "finished", "The run has finished.", evidence, f"Use it: llmtrain generate {view.argument}")
    if view.state == RunState.NOT_STARTED:
        what = "No process has trained in this directory yet."
        return _why(view, "not_started", what, ["It records no start and has no metrics."], _resume(view))
    return _why_ended(view)


def _why_running(view: RunView) -> Why:
    evidence = [f"Rank {rank.rank} on {rank.host}: step {rank.step}, {rank.age:.0f} s ago." for rank in view.ranks()]
    what = f"The run is training, at step {view.step} of {view.max_steps or 'unknown'}."
    return _why(view, "healthy", what, evidence[:_MAX_RANKS_SHOWN], "Nothing to do.")


def _why_silent(view: RunView, silent: list[RankView]) -> Why:
    longest = max(rank.age for rank in silent)
    names = ", ".join(str(rank.rank) for rank in silent[:_MAX_RANKS_NAMED])
    if len(silent) > _MAX_RANKS_NAMED:
        names += ", ..."
    return _why(
        view,
        "rank_silent",
        f"No heartbeat from rank {names} for {longest:.0f} s.",
        [f"Rank {rank.rank} on {rank.host}: last step {rank.step}." for rank in silent[:_MAX_RANKS_SHOWN]],
        "Check the process on that machine. The other ranks stop with an error when they time out.",
    )


def _why_ended(view: RunView) -> Why:
    """A run that was interrupted, failed or was killed."""
    start = view.last_start
    evidence = []
    if start:
        host = short_text(start.get("host"))
        evidence.append(f"Start {start['generation']} of the run on {host} began at step {start['from_step']}.")
    report = last_report(view)
    if report is None:
        if view.state == RunState.KILLED:
            cause = "killed"
            what = "The last start ended without an exit report: it was killed, or the machine went down."
        else:  # its end was recorded, its report was not: a full disk, for example
            cause = "crash"
            what = f"The last start is recorded as {view.state}, without an exit report. Its log says more."
        newest = view.checkpoint_names[-1:]
        evidence.append(f"Its newest checkpoint is {newest[0]}." if newest else "It has no checkpoint.")
        return _why(view, cause, what, evidence, _resume(view))

    at_step = f", step {report.step}" if report.step else ""
    evidence.append(f"Exit code {report.exit_code} at {report.time[:_MAX_TIME]}{at_step}.")
    if report.silent_ranks:
        evidence.append(f"Ranks without a heartbeat: {', '.join(map(str, report.silent_ranks))}.")
    remedy = report.remedy or ""
    if "resume" not in remedy.lower():
        remedy = f"{remedy} {_resume(view)}".strip()
    if report.reason:
        cause = report.reason
    elif view.state == RunState.INTERRUPTED:
        cause = "interrupted"
    else:
        cause = report.error or "crash"
    return _why(view, short_text(cause)[:_MAX_CAUSE], short_text(report.message), evidence, short_text(remedy))


def last_report(view: RunView) -> ExitReport | None:
    """The exit report of the last start; None if it wrote none."""
    report = view.newest_report
    generation = view.last_start.get("generation")
    is_older = report is not None and report.generation is not None and report.generation != generation
    return None if is_older else report


def _resume(view: RunView) -> str:
    return f"Resume it: {view.resume_command}"


def _why(view: RunView, cause: str, what: str, evidence: list[str], remedy: str) -> Why:
    return Why(view.run.run_id, view.state, cause, what, evidence, remedy)
