"""Training progress on standard error: a bar in a terminal or notebook, tagged log lines elsewhere."""

import logging
import math
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from llmtrain.logs import console_handler, log
from llmtrain.progress import LiveLine, end_phases, is_live
from llmtrain.text import format_bytes, sparkline
from llmtrain.tracking.base import Metrics, Status, TrackedRun, Tracker

if TYPE_CHECKING:
    from rich.text import Text

MIN_BAR, ROOMY_BAR, MAX_BAR = 8, 16, 60
KEPT_FIRST = (
    "train/loss",
    "state",
    "train/tokens_per_second",
    "course",
    "val/loss",
    "train/lr",
    "train/peak_memory_bytes",
)
"""What a narrow terminal shows, most important first: the first three down to MIN_BAR, others while there is room."""
COURSE_WIDTH, COURSE_POINTS = 8, 512
LINES_PER_RUN = 10
"""With a bar, about so many [TRAIN] lines are shown above it: the course of the loss stays in the scrollback."""


class ConsoleTracker(Tracker):
    def __init__(self, run: TrackedRun, may_show_bar: bool = True) -> None:
        self._max_steps = run.config.trainer.steps
        self._max_epochs = run.config.trainer.max_epochs
        end_phases(is_ready=True)
        self._line: LiveLine | None = None
        self._bar = Bar(self._max_steps, run.resumed_from)
        self._lines_shown = 0
        if may_show_bar and is_live():
            self._lines_shown = self._tenth(run.resumed_from)
            self._line = LiveLine(self._bar.render, is_transient=False)
            if handler := console_handler():
                handler.addFilter(self._is_shown)

    def step(self, step: int, seconds_left: float | None) -> None:
        self._bar.step, self._bar.activity = step, ""
        self._bar.set_time_left(seconds_left)

    def activity(self, what: str) -> None:
        self._bar.activity, self._bar.active_since = what, time.monotonic()

    def log(self, step: int, metrics: Metrics) -> None:
        position = f"step {step}/{self._max_steps}"
        self._bar.step = step
        self._bar.add(metrics)
        if "train/loss" in metrics:
            self._bar.set_time_left(metrics.get("train/seconds_left"))
            self._log_step(step, position, metrics)
        if "val/loss" in metrics:
            best = " | best" if metrics.get("val/is_best") else ""
            scores = f"val loss {metrics['val/loss']:.4f} | perplexity {metrics['val/perplexity']:.2f}"
            if "val/bits_per_byte" in metrics:
                scores += f" | bpb {metrics['val/bits_per_byte']:.3f}"
            log("EVAL", f"{position} | {scores}{best}", fields={"step": step, **metrics})
            if "epoch/number" in metrics:
                epoch = f"{metrics['epoch/number']:.0f}/{self._max_epochs} | {position}"
                text = f"{epoch} | train loss {metrics['epoch/train_loss']:.4f} | {scores}{best}"
                log("EPOCH", text, fields=metrics)

    def _log_step(self, step: int, position: str, metrics: Metrics) -> None:
        parts = [position, f"loss {metrics['train/loss']:.4f}", f"lr {metrics['train/lr']:.2e}"]
        if "train/tokens_per_second" in metrics:  # the first step of a process is not timed
            parts.append(f"{metrics['train/tokens_per_second']:,.0f} tok/s")
        if "train/mfu" in metrics:
            parts.append(f"mfu {metrics['train/mfu']:.1%}")
        if "train/seconds_left" in metrics:
            parts.append(f"{_duration(metrics['train/seconds_left'])} left")
        log("TRAIN", " | ".join(parts), fields={"step": step, **metrics})

    def finish(self, status: Status, result: dict[str, Any] | None) -> None:  # noqa: ARG002
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
        self.max_steps, self.step = max_steps, step
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
        parts, shown = self._parts(), set[str]()
        for name in KEPT_FIRST:
            length = len(parts.get(name, "")) + 2
            if name in parts and room - length >= (MIN_BAR if name in KEPT_FIRST[:3] else ROOMY_BAR):
                shown.add(name)
                room -= length
        length = max(0, min(room, MAX_BAR))
        done = length * self.step // max(1, self.max_steps)
        text = Text(no_wrap=True)
        full, rest = self._characters[0], self._characters[1]
        text.append(head, "bold").append(full * done, "cyan").append(rest * (length - done), "dim")
        text.append("".join(f"  {part}" for name, part in parts.items() if name in shown))
        text.truncate(width)
        return text

    def _parts(self) -> dict[str, str]:
        """In the order in which they are shown."""
        formats = {
            "train/loss": lambda value: f"loss {value:.4f}",
            "val/loss": lambda value: f"val {value:.4f}",
            "train/lr": lambda value: f"lr {value:.1e}",
            "train/tokens_per_second": lambda value: f"{value:,.0f} tok/s",
            "train/peak_memory_bytes": format_bytes,
        }
        parts = {name: show(self.metrics[name]) for name, show in formats.items() if name in self.metrics}
        values = self._course.values
        course = {"course": sparkline(values, COURSE_WIDTH)} if self._is_utf and len(values) > 1 else {}
        order = dict.fromkeys(("train/loss", "course", *parts))
        return {**{name: (parts | course)[name] for name in order if name in parts | course}, "state": self._state()}

    def _state(self) -> str:
        """The time left, or what keeps the next step waiting."""
        now = time.monotonic()
        if self.activity:
            return f"{self.activity} {_duration(now - self.active_since)}"
        return "-:--:-- left" if self._ends_at is None else f"{_duration(max(0.0, self._ends_at - now))} left"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
