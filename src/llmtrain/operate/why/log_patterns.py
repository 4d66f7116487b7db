"""What a process said last: the error it ended with, in its own words, or the end of a traceback.

The lines are made by cli.py (`error: what` and the remedy below it), runs/exit_report.py (the watchdog's, as a line of
the log) and Python; tests hold what is read here against what those write.
"""

import re
from collections.abc import Sequence

from llmtrain.kubernetes.api_errors import one_line
from llmtrain.operate.status.progress import split_line
from llmtrain.runs.exit_report import ExitReport

_ERROR = re.compile(r"(?:error|stopped): (.*)")
_RANK = re.compile(r"^(\[rank \d+\] |rank \d+: )")
_WATCHDOG = re.compile(r"(No progress for \d+ s at step \d+: .*?\.)( Look at that rank's log.*)?$")
_SILENT = re.compile(r"rank (\d+) (?:has gone silent|answers but is stuck)")
_TRACEBACK = "Traceback (most recent call last):"

# Reasons of errors.py, in the words of images that write no exit report, and of pods that have not ended.
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
    """The report that an image of the first version would have written."""
    reason = next((name for name, pattern in _REASONS.items() if pattern.search(message)), None)
    error = next((name for name, pattern in _TYPES.items() if pattern.search(message)), "")
    silent = tuple(sorted({int(rank) for rank in _SILENT.findall(message)}))
    return ExitReport(None, error, reason, message, remedy, silent_ranks=silent)


def without_rank(message: str) -> str:
    return _RANK.sub("", message)


def error_in(lines: Sequence[str]) -> ExitReport | None:
    """The last error of a log; with several processes, without the rank before it."""
    for number in range(len(lines) - 1, -1, -1):
        if found := _ERROR.match(lines[number]):
            return _with_remedy(found[1], lines[number + 1 :])
        text = _RANK.sub("", split_line(lines[number])[1])
        if found := _WATCHDOG.search(text):
            return report_from_text(one_line(found[1]), (found[2] or "").strip() or None)
    return None


def _with_remedy(what: str, after: Sequence[str]) -> ExitReport:
    """The problems of a config are listed below it, each behind a dash; a remedy has none."""
    problems: list[str] = []
    remedy: list[str] = []
    for line in after:
        if not line.startswith("  "):
            break
        (problems if line.startswith("  - ") else remedy).append(line.strip().removeprefix("- "))
    whole = f"{what}: {'; '.join(problems)}" if problems else what
    return report_from_text(one_line(_RANK.sub("", whole)), one_line(" ".join(remedy)) or None)


def traceback_end(lines: Sequence[str]) -> str | None:
    """`ValueError: what`, of the last traceback."""
    starts = [number for number, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    if not starts:
        return None
    before = lines[starts[-1]].removesuffix(_TRACEBACK)  # torchrun puts `[rank0]: ` before each line
    rest = (line.removeprefix(before) for line in lines[starts[-1] + 1 :])
    return next((one_line(line) for line in rest if line.strip() and not line.startswith(" ")), None)


def last_words(lines: Sequence[str]) -> str | None:
    """Where nothing else is known."""
    return next((one_line(line) for line in reversed(lines) if line.strip()), None)
