"""metrics.jsonl in the run directory: always written, and read by the other commands."""

import time
from typing import Any

from llmtrain.runs.metrics import MetricsLog
from llmtrain.runs.state import EndStatus
from llmtrain.tracking.base import Metrics, TrackedRun, Tracker


class JsonlTracker(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        self._log = MetricsLog(run.directory.metrics, run.resumed_from, run.evaluated_step)

    def log(self, step: int, metrics: Metrics) -> None:
        self._log.append({"step": step, **metrics, "time": round(time.time(), 3)})

    def saved(self, step: int) -> None:  # noqa: ARG002
        self._log.sync()

    def finish(self, status: EndStatus, result: dict[str, Any] | None) -> None:  # noqa: ARG002
        self._log.close()
