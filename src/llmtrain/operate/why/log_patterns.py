"""The last error in a log, for images of the first version, which write no exit reports; and the end of a traceback.

The lines are written by cli.py (`error: what` and the remedy below it), runs/exit_report.py (of the watchdog, as a line
of the log) and Python. Tests compare these patterns with what is written.
"""

import re
from collections.abc import Sequence

from llmtrain.operate.status.progress import split_line
from llmtrain.redact import redacted_line
from llmtrain.runs.exit_report import ExitReport

_ERROR = re.compile(r"(?:error|stopped): (.*)")
_RANK = re.compile(r"^(\[rank \d+\] |rank \d+: )")
_WATCHDOG = re.compile(r"(No progress for \d+ s at step \d+: .*?\.)( Look at that rank's log.*)?$")
_SILENT = re.compile(r"rank (\d+) (?:has gone silent|answers but is stuck)")
_TRACEBACK = "Traceback (most recent call last):"

# Reasons of errors.py, as worded by images that write no exit report, and by pods that have not exited.
_REASONS = {
    "not_finite": re.compile(r"The .+ (?:of|after) step \d+ is (?:nan|-?inf)\b"),
    "gpu_memory": re.compile(r"Out of GPU memory in step \d+"),
    "gave_up": re.compile(r"crashed \d+ times in a row "),
    "disk_full": re.compile(r"The checkpoint of step \d+ could not be written|The disk of .+ is full: "),
    "master_unreachable": re.compile(r"could not be reached within|waiting for the master"),
    "processes_missing": re.compile(r"\d+ of \d+ processes never came: rank [\d, .]+"),
    "no_progress": re.compile(r"^No progress for"),
    "not_writable": re.compile(r"^Cannot write to "),
}
_TYPES = {
    "JoinError": re.compile(r"could not join the \d+ processes|did not find each other at"),
    "CheckpointError": re.compile(r"checkpoint|/step_\d+|manifest\.json", re.I),
    "Interrupted": re.compile(r"as told|told to stop"),
}


def report_from_text(message: str, remedy: str | None = None) -> ExitReport:
    """The report that corresponds to an error message of the first version."""
    reason = next((name for name, pattern in _REASONS.items() if pattern.search(message)), None)
    error = next((name for name, pattern in _TYPES.items() if pattern.search(message)), "")
    silent = tuple(sorted({int(rank) for rank in _SILENT.findall(message)}))
    return ExitReport(None, error, reason, message, remedy, silent_ranks=silent)


def without_rank(message: str) -> str:
    return _RANK.sub("", message)


def error_in(lines: Sequence[str]) -> ExitReport | None:
    """The last error in a log, without its rank prefix."""
    for number in range(len(lines) - 1, -1, -1):
        if match := _ERROR.match(lines[number]):
            return _with_remedy(match[1], lines[number + 1 :])
        text = _RANK.sub("", split_line(lines[number])[1])
        if match := _WATCHDOG.search(text):
            return report_from_text(redacted_line(match[1]), (match[2] or "").strip() or None)
    return None


def _with_remedy(what: str, after: Sequence[str]) -> ExitReport:
    """The error with the lines below it: problems of a config start with a dash, a remedy does not."""
    problems: list[str] = []
    remedy: list[str] = []
    for line in after:
        if not line.startswith("  "):
            break
        (problems if line.startswith("  - ") else remedy).append(line.strip().removeprefix("- "))
    whole = f"{what}: {'; '.join(problems)}" if problems else what
    return report_from_text(redacted_line(_RANK.sub("", whole)), redacted_line(" ".join(remedy)) or None)


def traceback_end(lines: Sequence[str]) -> str | None:
    """The exception of the last traceback: `ValueError: what`."""
    starts = [number for number, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    if not starts:
        return None
    prefix = lines[starts[-1]].removesuffix(_TRACEBACK)  # torchrun prefixes lines with `[rank0]: `
    rest = (line.removeprefix(prefix) for line in lines[starts[-1] + 1 :])
    return next((redacted_line(line) for line in rest if line.strip() and not line.startswith(" ")), None)


def last_line(lines: Sequence[str]) -> str | None:
    return next((redacted_line(line) for line in reversed(lines) if line.strip()), None)
