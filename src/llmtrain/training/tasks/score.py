"""The score of a model on a task: its metrics, and the value of every item, to compare models on the same items."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmtrain.core.text import first_names
from llmtrain.errors import DataError

Values = Mapping[str, Sequence[float]]
"""Metric -> its value for each item."""


@dataclass(frozen=True)
class TaskScore:
    task: str
    version: str | None
    """Of a stock task."""
    few_shot: int
    """Examples before each question."""
    items: int
    truncated: int
    """Items whose beginning the model could not read."""
    chat_template: bool
    sha256: str
    """Of the items: equal hashes mean the same questions and answers."""
    metrics: dict[str, float]
    stderr: dict[str, float | None]
    """Standard error of each metric; None if it is not a mean."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """Metric -> value of each item, for metrics that are means of these."""

    def as_dict(self) -> dict[str, Any]:
        """For people and files: without the values of the items."""
        return {
            "version": self.version,
            "few_shot": self.few_shot,
            "items": self.items,
            "truncated": self.truncated,
            "chat_template": self.chat_template,
            "sha256": self.sha256,
            "metrics": self.metrics,
            "stderr": self.stderr,
        }


def check_readable(readable: Mapping[str, int], max_length: int) -> None:
    """Raise DataError if the model reads no item of a task to its beginning. `readable`: task -> number of items that
    are not cut off."""
    too_long = [task for task, count in readable.items() if not count]
    if too_long:
        raise DataError(
            f"Every item of {first_names(too_long)} is longer than the {max_length} tokens that the model reads: its "
            "score would mean nothing.",
            remedy="Leave this task out, ask for fewer examples, or use a model with a longer context.",
        )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None for a single value."""
    if len(values) < 2:
        return None
    center = mean(values)
    return math.sqrt(sum((value - center) ** 2 for value in values) / (len(values) - 1) / len(values))


def items_sha256(items: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for item in items:
        data = item.encode(errors="surrogatepass")
        digest.update(f"{len(data)} ".encode() + data)
    return digest.hexdigest()


def logged_metrics(scores: Sequence[TaskScore]) -> dict[str, float]:
    """Under the names that metrics.jsonl, the trackers and trainer.best_metric have for them."""
    return {f"tasks/{score.task}/{name}": value for score in scores for name, value in score.metrics.items()}
