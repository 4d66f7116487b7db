"""Two models on the same items: the difference of their scores, how sure it is, and the items that changed."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from llmtrain.config.best_metric import is_higher_better
from llmtrain.errors import DataError
from llmtrain.training.tasks.score import TaskScore, mean, standard_error

CONFIDENCE = 0.95
_DEVIATIONS = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


@dataclass(frozen=True)
class Difference:
    """One metric of one task: the model minus the baseline."""

    baseline: float
    difference: float
    low: float | None
    """Lower end of the 95 % confidence interval. It is paired: what an item adds to both scores does not widen it.
    None if the metric is not a mean over the items."""
    high: float | None
    better: list[int]
    """Items, by their number from 0, on which the model is better than the baseline."""
    worse: list[int]


def compare_scores(scores: Sequence[TaskScore], baselines: Sequence[TaskScore]) -> dict[str, dict[str, Difference]]:
    """Task -> metric -> difference."""
    by_task = {score.task: score for score in baselines}
    return {score.task: _compare(score, by_task[score.task]) for score in scores}


def _compare(score: TaskScore, baseline: TaskScore) -> dict[str, Difference]:
    if score.sha256 != baseline.sha256:
        raise DataError(f"The items of task '{score.task}' have changed between the two evaluations.")
    found = {}
    for metric, value in score.metrics.items():
        if metric in baseline.metrics:
            found[metric] = _difference(score, baseline, metric, value)
    return found


def _difference(score: TaskScore, baseline: TaskScore, metric: str, value: float) -> Difference:
    difference = value - baseline.metrics[metric]
    values = score.values.get(metric)
    others = baseline.values.get(metric)
    if values is None or others is None:
        return Difference(baseline.metrics[metric], difference, None, None, [], [])
    by_item = [mine - other for mine, other in zip(values, others, strict=True)]
    error = standard_error(by_item)
    gained = [number for number, change in enumerate(by_item) if change > 0]
    lost = [number for number, change in enumerate(by_item) if change < 0]
    better, worse = gained, lost
    if not is_higher_better(f"tasks/{score.task}/{metric}"):
        better, worse = lost, gained
    low = high = None
    if error is not None:
        center = mean(by_item)
        low = center - _DEVIATIONS * error
        high = center + _DEVIATIONS * error
    return Difference(baseline.metrics[metric], difference, low, high, better, worse)
