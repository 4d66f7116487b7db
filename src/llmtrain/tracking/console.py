"""Training progress on standard error: a bar in a terminal or notebook, tagged log lines elsewhere."""

import logging
import math
import sys
import time
from typing import TYPE_CHECKING, Any

from llmtrain.core.logs import console_handler
from llmtrain.core.progress import LiveLine, end_phases, is_live
from llmtrain.core.text import format_bytes, sparkline
from llmtrain.runs.progress_lines import duration_text, log_evaluation, log_micro_batch, log_step
from llmtrain.runs.state import EndStatus
from llmtrain.tracking.base import Metrics, TrackedRun, Tracker

if TYPE_CHECKING:
    from rich.text import Text

MIN_BAR = 8
ROOMY_BAR = 16
MAX_BAR = 60
KEPT_FIRST = (
    "train/loss",
    "state",
    "train/tokens_per_second",
    "course",
    "val/loss",
    "train/lr",
    "train/peak_memory_bytes",
)
"""What a narrow terminal shows, most important first. The first three leave MIN_BAR columns to the bar, others more."""
COURSE_WIDTH = 8
COURSE_POINTS = 512
LINES_PER_RUN = 10
"""With a progress bar, print about this many [TRAIN] lines per run, so the loss history stays in the scrollback."""


LONG_STEP_SEC = 5.0
"""After this time in one step, the bar shows the micro-batch."""
MICRO_BATCH_LINE_SEC = 60.0
"""Without a bar, one log line per so much time in one step."""


class ConsoleTracker(Tracker):
    def __init__(self, run: TrackedRun, may_show_bar: bool = True) -> None:
        self._max_steps = run.config.trainer.steps
        self._max_epochs = run.config.trainer.max_epochs
        end_phases(is_ready=True)
        self._line: LiveLine | None = None
        self._bar = Bar(self._max_steps, run.resumed_from)
        self._lines_shown = 0
        self._step_began = self._micro_batch_logged = time.monotonic()
        if may_show_bar and is_live():
            self._lines_shown = self._tenth(run.resumed_from)
            self._line = LiveLine(self._bar.render, is_transient=False)
            if handler := console_handler():
                handler.addFilter(self._is_shown)

    def step(self, step: int, seconds_left: float | None) -> None:
        self._bar.step = step
        self._bar.activity = ""
        self._bar.set_time_left(seconds_left)

    def micro_batch(self, step: int, number: int, count: int) -> None:
        now = time.monotonic()
        if number == 1:
            self._step_began = self._micro_batch_logged = now
        elif self._line is None:
            if now - self._micro_batch_logged >= MICRO_BATCH_LINE_SEC:
                self._micro_batch_logged = now
                log_micro_batch(step, number, count, now - self._step_began)
        elif now - self._step_began >= LONG_STEP_SEC:
            self._bar.activity = f"step {step}: micro-batch {number} of {count}"
            self._bar.active_since = self._step_began

    def activity(self, what: str) -> None:
        self._bar.activity = what
        self._bar.active_since = time.monotonic()

    def log(self, step: int, metrics: Metrics) -> None:
        self._bar.step = step
        self._bar.add(metrics)
        if "train/loss" in metrics:
            self._bar.set_time_left(metrics.get("train/seconds_left"))
            log_step(step, self._max_steps, metrics)
        if "val/loss" in metrics:
            log_evaluation(step, self._max_steps, self._max_epochs, metrics)

    def finish(self, status: EndStatus, result: dict[str, Any] | None) -> None:  # noqa: ARG002
        if self._line is not None:
            self._bar.activity = ""
            self._line.stop()
            if handler := console_handler():
                handler.removeFilter(self._is_shown)

    def _is_shown(self, record: logging.LogRecord) -> bool:
        """Whether a line is shown above the bar. The log file has all of them."""
        step = getattr(record, "fields", {}).get("step")
        if getattr(record, "tag", None) != "TRAIN" or record.levelno > logging.INFO or step is None:
            return True
        is_due = self._tenth(step) > self._lines_shown
        self._lines_shown = self._tenth(step)
        return is_due

    def _tenth(self, step: int) -> int:
        return step * LINES_PER_RUN // max(1, self._max_steps)


class Course:
    """All values so far as few means, each of the same number of values."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._pending: list[float] = []
        self._stride = 1

    def add(self, value: float) -> None:
        self._pending.append(value)
        if len(self._pending) < self._stride:
            return
        self.values.append(sum(self._pending) / self._stride)
        self._pending.clear()
        if len(self.values) == COURSE_POINTS:
            self.values = [sum(self.values[i : i + 2]) / 2 for i in range(0, COURSE_POINTS, 2)]
            self._stride *= 2


class Bar:
    """The progress bar: what it shows, and how that fits into a line."""

    def __init__(self, max_steps: int, step: int) -> None:
        self.max_steps = max_steps
        self.step = step
        self.metrics: Metrics = {}
        self.activity = ""
        """What takes longer than a step, such as `evaluating`."""
        self.active_since = time.monotonic()
        self._ends_at: float | None = None
        self._course = Course()
        self._is_utf = "utf" in (sys.stderr.encoding or "").lower()
        self._characters = "━─" if self._is_utf else "=-"

    def add(self, metrics: Metrics) -> None:
        """New values, which stay until there are newer ones."""
        self.metrics.update(metrics)
        loss = metrics.get("train/loss")
        if loss is not None and math.isfinite(loss):
            self._course.add(loss)

    def set_time_left(self, seconds: float | None) -> None:
        self._ends_at = None if seconds is None else time.monotonic() + seconds

    def render(self, width: int) -> "Text":
        from rich.text import Text

        head = f"step {self.step:>{len(str(self.max_steps))}}/{self.max_steps} "
        room = width - len(head)
        parts = self._parts()
        shown = set[str]()
        for name in KEPT_FIRST:
            length = len(parts.get(name, "")) + 2
            if name in parts and room - length >= (MIN_BAR if name in KEPT_FIRST[:3] else ROOMY_BAR):
                shown.add(name)
                room -= length
        length = max(0, min(room, MAX_BAR))
        done = length * self.step // max(1, self.max_steps)
        text = Text(no_wrap=True)
        full = self._characters[0]
        rest = self._characters[1]
        text.append(head, "bold").append(full * done, "cyan").append(rest * (length - done), "dim")
        text.append("".join(f"  {part}" for name, part in parts.items() if name in shown))
        text.truncate(width)
        return text

    def _parts(self) -> dict[str, str]:
        """The parts of the line by name, in the order in which they are shown."""
        formats = {
            "train/loss": lambda value: f"loss {value:.4f}",
            "val/loss": lambda value: f"val {value:.4f}",
            "train/lr": lambda value: f"lr {value:.1e}",
            "train/tokens_per_second": lambda value: f"{value:,.0f} tok/s",
            "train/peak_memory_bytes": format_bytes,
        }
        parts = {}
        for name, show in formats.items():
            if name in self.metrics:
                parts[name] = show(self.metrics[name])
            if name == "train/loss" and self._is_utf and len(self._course.values) > 1:
                parts["course"] = sparkline(self._course.values, COURSE_WIDTH)
        parts["state"] = self._state()
        return parts

    def _state(self) -> str:
        """The time left, or what keeps the next step waiting."""
        now = time.monotonic()
        if self.activity:
            return f"{self.activity} {duration_text(now - self.active_since)}"
        if self._ends_at is None:
            return "-:--:-- left"
        return f"{duration_text(max(0.0, self._ends_at - now))} left"
