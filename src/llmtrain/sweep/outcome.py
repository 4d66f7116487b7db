"""How a run ended, read from its files: the same for the same run, whoever trained it, however often it was killed."""

from collections.abc import Sequence
from typing import Any

from llmtrain.errors import TrainingFailed
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.json_values import finite, integer
from llmtrain.runs.view import RunView
from llmtrain.sweep.record import DIVERGED, FAILED, FINISHED, Outcome

Row = dict[str, Any]
PATIENCE = 3
"""Logged training losses in a row far above the first one, after which a trial has diverged. One may be a hard
batch."""
RISE = 0.5
"""How far, as a share of the first one. The loss of a fine-tuning that has learned little is as often above the first
one as below: such a trial is bad, but has not diverged."""
NOT_FINITE = "not_finite"
GPU_MEMORY = "gpu_memory"


def diverged_at(rows: Sequence[Row], steps: int | None) -> int | None:
    """The step at which the training loss has been far above the first one for PATIENCE logged rows; None if it was
    not until `steps`."""
    limit: float | None = None
    above = 0
    for row in rows:
        loss = row.get("train/loss")
        if loss is None or (steps is not None and row["step"] > steps):
            continue
        if limit is None:
            limit = loss + RISE * abs(loss)
        above = above + 1 if loss > limit else 0
        if above == PATIENCE:
            return int(row["step"])
    return None


def read_outcome(run: RunDirectory, metric: str, steps: int | None, error: dict[str, Any]) -> Outcome | None:
    """The outcome at a rung of `steps`; None if the run has to be started again. `error`: what its process reported."""
    view = RunView(run)
    rows = view.rows
    step = diverged_at(rows, steps)
    if step is not None:
        return Outcome(DIVERGED, step, None, None, None, "loss far above the first")
    reason = error.get("reason")
    if reason in (NOT_FINITE, GPU_MEMORY):
        last = max((row["step"] for row in rows if row.get("train/loss") is not None), default=0)
        if reason == NOT_FINITE:
            return Outcome(DIVERGED, last, None, None, None, "loss not finite")
        return Outcome(FAILED, last, None, None, None, "out of GPU memory")
    return _finished(view, metric, steps)


def _finished(view: RunView, metric: str, steps: int | None) -> Outcome | None:
    result = view.result
    reached = integer(result.get("steps"))
    is_complete = steps is None or reached >= steps or result.get("stopped_early")
    if not result or not is_complete or not result.get("state_sha256"):
        return None
    values = [row[metric] for row in view.rows if row.get(metric) is not None and row["step"] <= reached]
    score = finite(values[-1]) if values else None
    if score is None:
        raise TrainingFailed(
            f"No evaluation of run '{view.run.run_id}' wrote {metric}.",
            remedy="Start a sweep with another --metric, such as val/loss.",
        )
    return Outcome(FINISHED, reached, score, integer(result.get("tokens")), str(result["state_sha256"]))
