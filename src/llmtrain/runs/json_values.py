"""Values from the JSON files of a run. The files may be damaged, or written by another program: each function accepts
anything, and returns a value of its type."""

import math
from datetime import datetime
from typing import Any

MAX_INTEGER = 1 << 53
"""JavaScript represents integers exactly only up to 2^53; no step, rank or size is as large."""
MAX_TEXT = 20_000
"""Characters of a message, a prompt or an answer that are shown."""


def dictionary(value: Any) -> dict[str, Any]:
    """The JSON object; empty for what is not one."""
    return value if isinstance(value, dict) else {}


def integer(value: Any) -> int:
    """The integer; 0 for what is not one."""
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= MAX_INTEGER:
        return 0
    return value


def finite(value: Any) -> float | None:
    """The number; None for what is not one."""
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def epoch(text: Any) -> float | None:
    """Seconds since the epoch of an ISO time; None for what is not one."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def short_text(value: Any) -> str:
    """The value as text, cut to MAX_TEXT; empty for null."""
    return "" if value is None else str(value)[:MAX_TEXT]
