"""The rows of metrics.jsonl as trackers receive them, for what a server did not receive before an interruption."""

import math

from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.metrics import Row, read_metrics
from llmtrain.tracking.base import Metrics

_NO_METRIC = ("step", "time")
TrackedRow = tuple[int, Metrics, int]
"""Step, metrics, and time in milliseconds since 1970."""


def read_rows(run: RunDirectory) -> list[TrackedRow]:
    """The rows of a run; null stands for a number that is not finite."""
    return [(row["step"], _metrics(row), _time_ms(row, run)) for row in read_metrics(run.metrics)]


def _metrics(row: Row) -> Metrics:
    values = {name: math.nan if value is None else value for name, value in row.items() if name not in _NO_METRIC}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _time_ms(row: Row, run: RunDirectory) -> int:
    seconds = row.get("time")
    return round((seconds if isinstance(seconds, int | float) else run.metrics.stat().st_mtime) * 1000)
