"""Progress of a run, read from the log of rank 0: tagged lines, or the same as JSON (logging.json_output).

The lines are written by tracking/console.py, training/smoke.py and training/run.py; tests compare both sides. Other
lines are ignored.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from llmtrain.distributed.exit_codes import IDLE_MARK

_TAGGED = re.compile(r"\[([A-Z]+\d*)\] (.*)")
# Repetitions are bounded, because a log may contain anything that slows a regular expression down.
_NUMBER = r"(-?[\d,]{0,24}\.?\d{1,24}(?:e[+-]?\d{1,3})?|nan|-?inf)"
_STEP = re.compile(r"(?:^|\| )step (\d{1,15})/(\d{1,15}) \|")
_LOSS = re.compile(rf"(?:^|\| )loss {_NUMBER}")
_VAL_LOSS = re.compile(rf"\bval loss {_NUMBER}")
_RATE = re.compile(rf"{_NUMBER} tok/s")
_LEFT = re.compile(r"\| ([^|]+) left$")
_DONE = re.compile(r"^(\d{1,15}) steps, train loss")
_FINISHED_BEFORE = re.compile(r"is finished already, at step (\d{1,15})")
_RESUMED = re.compile(r"resumed from \S*step_(\d{1,15})$")
_IDLE = re.compile(rf"^{re.escape(IDLE_MARK)} (\d{{1,3}});")


@dataclass(frozen=True)
class RunProgress:
    step: int | None = None
    max_steps: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_second: float | None = None
    time_left: str | None = None
    has_stepped: bool = False
    """Whether a step was logged since the start: a resumed run logs its step number before its first step."""
    is_done: bool = False
    """Whether it logged that the run is finished."""
    idle_code: int | None = None
    """Exit code logged by a StatefulSet pod of the first version, which then waits to be deleted."""

    def after(self, line: str) -> "RunProgress":
        """The progress after one more line."""
        tag, text = split_line(line)
        if tag in ("TRAIN", "EVAL", "EPOCH"):
            return self._after_step(tag, text)
        if tag == "DONE":
            done = _DONE.search(text) or _FINISHED_BEFORE.search(text)
            return replace(self, step=int(done[1]), time_left=None, is_done=True) if done else self
        if tag == "DDP" and (idle := _IDLE.search(text)):
            return replace(self, idle_code=int(idle[1]), time_left=None)
        return self

    def _after_step(self, tag: str, text: str) -> "RunProgress":
        if resumed := _RESUMED.search(text):
            return replace(self, step=int(resumed[1]), has_stepped=False, tokens_per_second=None, time_left=None)
        match = _STEP.search(text)
        if not match:
            return self
        progress = replace(self, step=int(match[1]), max_steps=int(match[2]), has_stepped=True)
        if tag != "TRAIN":
            return replace(progress, val_loss=_number(_VAL_LOSS.search(text), self.val_loss))
        left = _LEFT.search(text)
        return replace(
            progress,
            loss=_number(_LOSS.search(text), self.loss),
            tokens_per_second=_number(_RATE.search(text), None),
            time_left=left[1] if left else None,
        )


def read_progress(lines: Iterable[str]) -> RunProgress:
    progress = RunProgress()
    for line in lines:
        progress = progress.after(line)
    return progress


def split_line(line: str) -> tuple[str | None, str]:
    """(tag, text) of a log line, tagged or JSON."""
    if line.startswith("{"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return None, line
        return value.get("tag"), str(value.get("message", ""))
    tagged = _TAGGED.match(line)
    return (tagged[1], tagged[2]) if tagged else (None, line)


def _number(match: re.Match[str] | None, default: float | None) -> float | None:
    return float(match[1].replace(",", "")) if match else default
