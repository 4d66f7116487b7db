"""How far a run is, from the log of rank 0: tagged lines, or the same as JSON (logging.json_output).

The lines are made by tracking/console.py, training/smoke.py and training/run.py; tests hold what is read here against
what those write. A line that says something else is passed over.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from llmtrain.distributed.exit_codes import IDLE_MARK

_TAGGED = re.compile(r"\[([A-Z]+\d*)\] (.*)")
# Numbers have an end: a log may hold anything, and must not keep a regular expression busy.
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
    """Whether a step was logged: a run that has just resumed knows its step before it makes one."""
    is_done: bool = False
    """Whether it said that the run is finished."""
    idle_code: int | None = None
    """What the node ended with, where it waits to be removed (StatefulSet)."""

    def after(self, line: str) -> "RunProgress":
        """What is known once this line was read as well."""
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
        found = _STEP.search(text)
        if not found:
            return self
        known = replace(self, step=int(found[1]), max_steps=int(found[2]), has_stepped=True)
        if tag != "TRAIN":
            return replace(known, val_loss=_number(_VAL_LOSS.search(text), self.val_loss))
        left = _LEFT.search(text)
        return replace(
            known,
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
    """(tag, text) of a line of the log, in either of its forms."""
    if line.startswith("{"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return None, line
        return value.get("tag"), str(value.get("message", ""))
    tagged = _TAGGED.match(line)
    return (tagged[1], tagged[2]) if tagged else (None, line)


def _number(found: re.Match[str] | None, otherwise: float | None) -> float | None:
    return float(found[1].replace(",", "")) if found else otherwise
