"""Trackers record metrics. A tracker that fails never stops training.

Metric names are the same in all of them: train/loss, train/lr, val/loss, ...
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from llmtrain.config.schema import Config
from llmtrain.core.logs import warn
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.state import EndStatus

Metrics = dict[str, float]
OnLog = Callable[[int, Metrics], None]


@dataclass(frozen=True)
class TrackedRun:
    """The run, for trackers."""

    directory: RunDirectory
    config: Config
    resumed_from: int
    """Step of the checkpoint that the run resumes from; 0 for a new run."""
    evaluated_step: int
    """The last step that was evaluated before that checkpoint was saved."""
    facts: dict[str, Any]
    """Constants of the run, such as the parameter count."""


class Tracker:
    """Base class of trackers. Every hook is optional. A plugin (docs/extending.md) is called with the
    run and its validated options."""

    class Options(BaseModel):
        """What `options` in tracking.custom accepts: nothing, unless a class declares its own."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Called with the metrics of a step, which include train/loss, val/loss or both."""

    def step(self, step: int, seconds_left: float | None) -> None:
        """Called after every step, so it must be fast. There is no loss yet: reading it would wait for the GPU."""

    def micro_batch(self, step: int, number: int, count: int) -> None:
        """Called before each micro-batch of a step, `number` from 1, so it must be fast. A GPU may be behind."""

    def activity(self, what: str) -> None:
        """Called when the next step has to wait: `compiling`, `evaluating`, `saving`."""

    def saved(self, step: int) -> None:
        """Called before the checkpoint of a step is published."""

    def samples(self, step: int, path: Path) -> None:
        """Called with the file of the model's answers to trainer.eval_prompts."""

    def finish(self, status: EndStatus, result: dict[str, Any] | None) -> None:
        """Called once, after all other hooks."""


class Trackers(Tracker):
    """Several trackers as one. A tracker that fails is removed, with a warning."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, metrics: Metrics) -> None:
        self._each(lambda tracker: tracker.log(step, metrics))

    def step(self, step: int, seconds_left: float | None) -> None:
        self._each(lambda tracker: tracker.step(step, seconds_left))

    def micro_batch(self, step: int, number: int, count: int) -> None:
        self._each(lambda tracker: tracker.micro_batch(step, number, count))

    def activity(self, what: str) -> None:
        self._each(lambda tracker: tracker.activity(what))

    def saved(self, step: int) -> None:
        self._each(lambda tracker: tracker.saved(step))

    def samples(self, step: int, path: Path) -> None:
        self._each(lambda tracker: tracker.samples(step, path))

    def finish(self, status: EndStatus, result: dict[str, Any] | None) -> None:
        self._each(lambda tracker: tracker.finish(status, result))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except KeyboardInterrupt:
                raise
            except BaseException as problem:  # also SystemExit: a tracker does not end the run
                self._trackers.remove(tracker)
                name = type(tracker).__name__
                warn("TRAIN", f"{name} failed and is disabled; training continues: {type(problem).__name__}: {problem}")


class CallbackTracker(Trackers):
    """A tracker, and a function of the caller's. Unlike a tracker, the function may end the run: what it raises is
    raised to the caller."""

    def __init__(self, tracker: Tracker, on_log: OnLog) -> None:
        super().__init__([tracker])
        self._on_log = on_log

    def log(self, step: int, metrics: Metrics) -> None:
        super().log(step, metrics)
        self._on_log(step, dict(metrics))
