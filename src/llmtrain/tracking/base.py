"""Trackers: where metrics go. None of them can stop training.

Metric names are the same everywhere: train/loss, train/lr, val/loss, ...
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmtrain.config.schema import Config
from llmtrain.logs import warn
from llmtrain.runs.directory import RunDirectory

Metrics = dict[str, float]
Status = Literal["finished", "stopped", "superseded", "failed"]


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker may want to know of the run."""

    directory: RunDirectory
    config: Config
    resumed_from: int
    """Step of the checkpoint the run goes on from; 0 for a new run."""
    evaluated_step: int
    """The last step that was evaluated before that checkpoint was saved."""
    facts: dict[str, Any]
    """Numbers that hold for the whole run, such as the parameter count."""


class NullTracker:
    """A tracker that does nothing, and the contract of the others: override what is of use."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Metrics of a step, at least one of train/loss and val/loss among them."""

    def saved(self, step: int) -> None:
        """A checkpoint of this step is about to be published."""

    def samples(self, step: int, path: Path) -> None:
        """What the model answered to the fixed prompts, in a file."""

    def finish(self, status: Status, result: dict[str, Any] | None) -> None:
        """The run ended; no call follows."""


class Trackers(NullTracker):
    """Several trackers as one. One that fails is dropped, and that is said once."""

    def __init__(self, trackers: Sequence[NullTracker]) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, metrics: Metrics) -> None:
        self._each(lambda tracker: tracker.log(step, metrics))

    def saved(self, step: int) -> None:
        self._each(lambda tracker: tracker.saved(step))

    def samples(self, step: int, path: Path) -> None:
        self._each(lambda tracker: tracker.samples(step, path))

    def finish(self, status: Status, result: dict[str, Any] | None) -> None:
        self._each(lambda tracker: tracker.finish(status, result))

    def _each(self, call: Callable[[NullTracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as problem:
                self._trackers.remove(tracker)
                name = type(tracker).__name__
                warn("TRAIN", f"{name} failed and is switched off; training goes on: {problem}")
