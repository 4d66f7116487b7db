"""Order, number and choice of the rows of `runs list`."""

from datetime import UTC, datetime
from typing import Any

from llmtrain.errors import UsageError, nearest

Row = dict[str, Any]
SORT_KEYS = ("age", "best_val_loss", "lr", "run_id", "step", "train_loss", "val_loss")
_HIGHEST_FIRST = ("step",)
_SEARCHED = ("run_id", "name", "status", "dataset", "model")


def select_rows(rows: list[Row], sort: str | None, limit: int | None, text: str | None) -> list[Row]:
    """The summaries that contain the text, in order; `rows` are oldest first. Runs without the value come last."""
    if text:
        rows = [row for row in rows if any(text.lower() in str(row[name] or "").lower() for name in _SEARCHED)]
    if sort is None:
        return rows[-limit:] if limit else rows
    if sort not in SORT_KEYS:
        raise UsageError(f"--sort '{sort}' is unknown.{nearest(sort, SORT_KEYS)}", known=SORT_KEYS)
    if sort == "age":
        rows = rows[::-1]
    else:
        sign = -1 if sort in _HIGHEST_FIRST else 1
        with_value = [row for row in rows if row[sort] is not None]
        ordered = sorted(with_value, key=lambda row: sign * row[sort] if sort != "run_id" else row[sort])
        rows = [*ordered, *(row for row in rows if row[sort] is None)]
    return rows[:limit] if limit else rows


def age_of(row: Row, now: datetime | None = None) -> str | None:
    """`3 d` since the first start; None if that is not recorded."""
    try:
        started = datetime.fromisoformat(str(row["started_at"]))
        started = started if started.tzinfo else started.astimezone()
    except (ValueError, OverflowError):  # OverflowError: the year 1
        return None
    seconds = max(0.0, ((now or datetime.now(UTC)) - started).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
