"""The rows of `runs list` and what `runs show` shows, as JSON values; their order, number and choice."""

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from llmtrain.core.files import read_json
from llmtrain.errors import UsageError, nearest
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.heartbeats import read_heartbeats
from llmtrain.runs.json_values import integer
from llmtrain.runs.sources import pair_metrics, source_rows
from llmtrain.runs.task_scores import newest_task_scores
from llmtrain.runs.view import RunView

Row = dict[str, Any]
SORT_KEYS = ("age", "best_val_loss", "lr", "run_id", "step", "train_loss", "val_loss")
_HIGHEST_FIRST = ("step",)
_SEARCHED = ("run_id", "name", "status", "dataset", "model")


def summarize(view: RunView) -> Row:
    """State, step and losses of a run. `damaged` lists unreadable files; the rest of the summary is still filled."""
    losses = view.losses("train/loss")
    val_losses = view.losses("val/loss")
    row = {
        "run_id": view.run.run_id,
        "name": view.meta.get("name"),
        "status": view.state,
        "step": view.step,
        "max_steps": view.max_steps,
        "train_loss": losses[-1] if losses else None,
        "val_loss": val_losses[-1] if val_losses else None,
        "best_val_loss": min(val_losses, default=None),
        "task_scores": newest_task_scores(view.run),
        "state_sha256": view.result.get("state_sha256"),
        "started_at": view.meta.get("started_at"),
        "dataset": view.dataset,
        "model": view.setting("model").get("name"),
        "lr": view.setting("trainer").get("lr"),
        "parameters": integer(view.result.get("parameters")) or None,
        "latest": view.pointed("latest"),
        "path": str(view.run.path),
    }
    return {**row, "damaged": view.damaged}  # last: it has what could not be read for the others


def summarize_all(runs: Iterable[RunDirectory]) -> list[Row]:
    """The summaries of the runs that still exist afterwards."""
    rows = [(run, summarize(RunView(run))) for run in runs]
    return [row for run, row in rows if run.exists()]


def describe(view: RunView) -> Row:
    """The summary of a run, and its checkpoints, ranks, starts, result, metadata and config."""
    written = view.last_written
    stamp = None if written is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written))
    return {
        **summarize(view),
        "sources": source_rows(*view.last_rows),
        "pairs": pair_metrics(view.last_rows[1]),
        "last_written": stamp,
        "checkpoints": view.checkpoint_names,
        "best": view.pointed("best"),
        "ranks": [beat for _, beat in sorted(read_heartbeats(view.run.heartbeats).items())],
        "generations": view.generations,
        "result": read_json(view.run.finished),
        "meta": read_json(view.run.meta),
        "config": view.config,
    }


def select_rows(rows: list[Row], sort: str | None, limit: int | None, text: str | None) -> list[Row]:
    """The summaries that contain the text, in order; `rows` are oldest first. Runs without the value come last."""
    if text:
        rows = [row for row in rows if _contains(row, text.lower())]
    if sort is None:
        return rows[-limit:] if limit else rows
    if sort not in SORT_KEYS:
        raise UsageError(f"--sort '{sort}' is unknown.{nearest(sort, SORT_KEYS)}", known=SORT_KEYS)
    if sort == "age":
        ordered = rows[::-1]
    else:
        with_value = [row for row in rows if row[sort] is not None]
        without_value = [row for row in rows if row[sort] is None]
        if sort in _HIGHEST_FIRST:
            with_value.sort(key=lambda row: -row[sort])  # of equal values, the oldest first: not `reverse`
        else:
            with_value.sort(key=lambda row: row[sort])
        ordered = [*with_value, *without_value]
    return ordered[:limit] if limit else ordered


def _contains(row: Row, text: str) -> bool:
    return any(text in str(row[name] or "").lower() for name in _SEARCHED)


def age_of(row: Row, now: datetime | None = None) -> str | None:
    """`3 d` since the first start; None if that is not recorded."""
    try:
        started = datetime.fromisoformat(str(row["started_at"]))
        if started.tzinfo is None:
            started = started.astimezone()
    except (ValueError, OverflowError):  # OverflowError: the year 1
        return None
    seconds = max(0.0, ((now or datetime.now(UTC)) - started).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
