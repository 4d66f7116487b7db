"""The rows of metrics.jsonl as trackers receive them, for what a server did not receive before an interruption."""

import math

from llmtrain.runs.metrics import Row
from llmtrain.runs.view import RunView
from llmtrain.tracking.base import Metrics

_NO_METRIC = ("step", "time")
TrackedRow = tuple[int, Metrics, int]
"""Step, metrics, and time in milliseconds since 1970."""


def read_rows(view: RunView) -> list[TrackedRow]:
    """The rows of a run; null stands for a number that is not finite."""
    return [(row["step"], _metrics(row), _time_ms(row, view)) for row in view.read_rows()]


def _metrics(row: Row) -> Metrics:
    values = {name: math.nan if value is None else value for name, value in row.items() if name not in _NO_METRIC}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _time_ms(row: Row, view: RunView) -> int:
    seconds = row.get("time")
    if not isinstance(seconds, int | float):
        seconds = view.run.metrics.stat().st_mtime
    return round(seconds * 1000)
