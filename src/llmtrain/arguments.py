"""Arguments of the commands and of the Python API: their limits, and checks that raise UsageError."""

import operator
import os
from collections.abc import Iterable
from typing import Any

from llmtrain.errors import UsageError, nearest

MINIMUM = {"batch_size": 1, "block_size": 1, "checkpoint": 0, "max_new_tokens": 1, "seed": 0, "top_k": 1}


def as_integer(name: str, value: object) -> int:
    """An int, or an integer of numpy, that is not below its minimum."""
    lowest = MINIMUM[name]
    try:
        number = operator.index(value) if not isinstance(value, bool) else None  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < lowest:
        raise UsageError(f"{name} must be an integer of at least {lowest}, got {value!r}.")
    return number


def as_number(name: str, value: Any) -> float:
    """An int or float, or a number of numpy; text is not converted."""
    try:
        return float(value) if not isinstance(value, str | bytes | bool) else float("nan")
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{name} must be a number, got {value!r}.") from None


def as_text(name: str, value: object) -> str:
    """Text, or a path as text; not empty."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise UsageError(f"{name} must be text or a path, and not empty, got {value!r}.")
    return text


def check_one_of(name: str, value: object, known: Iterable[str]) -> None:
    known = list(known)
    if value not in known:
        raise UsageError(f"{name} {value!r} is unknown.{nearest(str(value), known)}", known=known)


def check_callable(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise UsageError(f"{name} must be a function, got {value!r}.")


def check_event(name: str, value: object) -> None:
    if value is not None and not callable(getattr(value, "is_set", None)):
        raise UsageError(f"{name} must be a threading.Event, got {value!r}.")
