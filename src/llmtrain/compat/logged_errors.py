"""The last error in the log of an image of 0.1.0, which writes no exit report.

Its lines are `error: what` with the remedy below, and the sentence of its watchdog. Messages have been reworded since,
so the patterns are those of 0.1.0; they also match what today's processes log.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain.core.logs import split_line, without_rank
from llmtrain.core.redact import redacted_line

_ERROR = re.compile(r"(?:error|stopped): (.*)")
_WATCHDOG = re.compile(r"(No progress for \d+ s at step \d+: .*?\.)( Look at that rank's log.*)?$")
_SILENT = re.compile(
    r"rank (\d+) (?:has gone silent|answers but is stuck|never sent a heartbeat|stopped sending heartbeats"
    r"|sends heartbeats but)"
)
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


@dataclass(frozen=True)
class LoggedError:
    """What an exit report says, as far as the words of the log tell it."""

    message: str
    remedy: str | None
    error: str
    """Error type, as in errors.py; empty if the words do not tell it."""
    reason: str | None
    silent_ranks: tuple[int, ...]


def last_error(lines: Sequence[str]) -> LoggedError | None:
    for number in range(len(lines) - 1, -1, -1):
        if match := _ERROR.match(lines[number]):
            return _with_remedy(match[1], lines[number + 1 :])
        text = without_rank(split_line(lines[number])[1])
        if match := _WATCHDOG.search(text):
            return classify(redacted_line(match[1]), (match[2] or "").strip() or None)
    return None


def _with_remedy(what: str, after: Sequence[str]) -> LoggedError:
    """The error with the lines below it: problems of a config start with a dash, a remedy does not."""
    problems: list[str] = []
    remedy: list[str] = []
    for line in after:
        if not line.startswith("  "):
            break
        if line.startswith("  - "):
            problems.append(line.strip().removeprefix("- "))
        else:
            remedy.append(line.strip())
    if problems:
        what = f"{what}: {'; '.join(problems)}"
    return classify(redacted_line(without_rank(what)), redacted_line(" ".join(remedy)) or None)


def classify(message: str, remedy: str | None = None) -> LoggedError:
    reason = next((name for name, pattern in _REASONS.items() if pattern.search(message)), None)
    error = next((name for name, pattern in _TYPES.items() if pattern.search(message)), "")
    silent = sorted({int(rank) for rank in _SILENT.findall(message)})
    return LoggedError(message, remedy, error, reason, tuple(silent))
