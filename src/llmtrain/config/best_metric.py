"""The metrics that decide which checkpoint is the best one, and whether higher values of them are better."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

VAL_LOSS = "val/loss"
OF_PAIRS = ("val/accuracy", "val/margin")
"""Written by objectives that compare two answers."""
OF_TOKENS = ("val/bits_per_byte", "val/perplexity")
"""Written by next_token."""
_IS_HIGHER_BETTER = {
    VAL_LOSS: False,
    "val/bits_per_byte": False,
    "val/perplexity": False,
    "val/accuracy": True,
    "val/margin": True,
    "tasks/*/acc": True,
    "tasks/*/acc_bytes": True,
    "tasks/*/acc_mutual_info": True,
    "tasks/*/acc_norm": True,
    "tasks/*/bits_per_byte": False,
    "tasks/*/brier_score": False,
    "tasks/*/byte_perplexity": False,
    "tasks/*/contains": True,
    "tasks/*/exact_match": True,
    "tasks/*/exact_match.*": True,
    "tasks/*/f1": True,
    "tasks/*/mcc": True,
    "tasks/*/perplexity": False,
    "tasks/*/word_perplexity": False,
}
"""Metrics that an evaluation writes -> whether a higher value is better. `*` is the name of a task or of a filter."""


def known_metrics() -> Iterable[str]:
    """For messages."""
    return [name.replace("*", "NAME", 1).replace(".*", ".FILTER") for name in _IS_HIGHER_BETTER]


def is_known(metric: str) -> bool:
    return any(fnmatchcase(metric, pattern) for pattern in _IS_HIGHER_BETTER)


def is_higher_better(metric: str) -> bool:
    return any(is_higher and fnmatchcase(metric, pattern) for pattern, is_higher in _IS_HIGHER_BETTER.items())


def is_better(metric: str, value: float, best: float | None) -> bool:
    """Whether a value is better than the best so far. An equal one is not: the earlier checkpoint stays the best."""
    if best is None:
        return True
    if is_higher_better(metric):
        return value > best
    return value < best


def metric_name(metric: str) -> str:
    """`acc` of tasks/NAME/acc; without a filter, which is part of the name."""
    return metric.split("/")[-1].split(".")[0]


def task_of(metric: str) -> str | None:
    """The task whose score a metric is; None for one of the validation data."""
    parts = metric.split("/")
    if len(parts) == 3 and parts[0] == "tasks":
        return parts[1]
    return None
