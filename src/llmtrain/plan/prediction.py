"""What a run is predicted to need, recorded when it starts, and beside it what it needs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmtrain.config.schema import Config
from llmtrain.plan.cost import seconds_left
from llmtrain.plan.history import PastRun
from llmtrain.plan.plan import plan_by_formula
from llmtrain.plan.target import Target
from llmtrain.runs.json_values import dictionary, finite, integer, short_text
from llmtrain.runs.view import RunView


@dataclass(frozen=True)
class Prediction:
    """Of a whole run, resumed or not. What is not known is None, and its source says why."""

    peak_memory_bytes: int | None
    """Of one process: of its GPU, or of the process on a CPU."""
    memory_source: str
    """`from a formula, ±25 %`"""
    tokens_per_second: float | None
    seconds: float | None
    """From the call of the training to its end."""
    time_source: str
    """`from FLOPs ±40 %`"""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Usage:
    """What a run needs. What is not known yet is None."""

    peak_memory_bytes: int | None
    """Without a GPU known when the run has finished."""
    tokens_per_second: float | None
    seconds: float | None
    """Of all starts; while it trains with the time that is left."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def predict(config: Config, target: Target, history: Sequence[PastRun] = ()) -> Prediction:
    """By the formula, in milliseconds: `llmtrain plan`, which traces a step, is more exact."""
    plan = plan_by_formula(config, target, history)
    peak = seconds = speed = None
    memory_source = time_source = plan.reason
    if plan.memory is not None:
        peak = plan.memory.peak
        memory_source = plan.memory.peak_source
    if plan.time is not None:
        speed = plan.time.tokens_per_second
        seconds = plan.time.total_seconds
        time_source = plan.time.source
        if speed is not None:
            source = time_source.partition(",")[0]  # without the rate that `llmtrain plan` names: it is one line
            time_source = f"{source} {plan.time.uncertainty_text}"
    return Prediction(peak, memory_source, speed, seconds, time_source)


def recorded_prediction(view: RunView) -> Prediction | None:
    """What the last start of a run recorded; None for runs of earlier versions."""
    values = dictionary(view.last_start.get("predicted"))
    if not values:
        return None
    return Prediction(
        peak_memory_bytes=max(0, integer(values.get("peak_memory_bytes"))) or None,
        memory_source=short_text(values.get("memory_source")),
        tokens_per_second=_positive(values.get("tokens_per_second")),
        seconds=_positive(values.get("seconds")),
        time_source=short_text(values.get("time_source")),
    )


def usage_of(view: RunView) -> Usage:
    train, _ = view.last_rows
    peak = integer(view.result.get("peak_memory_bytes")) or integer(train.get("train/peak_memory_bytes"))
    speed = _positive(view.result.get("tokens_per_second")) or _positive(train.get("train/tokens_per_second"))
    seconds = view.seconds
    if seconds is not None and not view.is_finished:
        left = seconds_left(view)
        seconds = None if left is None else finite(seconds + left)
    return Usage(max(0, peak) or None, speed, seconds)


def beside(actual: float | None, predicted: float | None, text: Callable[[float], str]) -> str | None:
    """`23.3 GB, predicted 24.1 GB (+3 %)`; None if neither is known."""
    if actual is None:
        return None if predicted is None else f"predicted {text(predicted)}"
    if predicted is None:
        return text(actual)
    shown = f"{text(actual)}, predicted {text(predicted)}"
    if not actual:
        return shown
    ratio = predicted / actual
    if ratio >= 10:
        return f"{shown} ({ratio:.0f} x)"
    return f"{shown} ({100 * (ratio - 1):+.0f} %)"


def _positive(value: Any) -> float | None:
    number = finite(value)
    return number if number is not None and number > 0 else None
