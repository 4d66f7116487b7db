"""Arguments that the commands and the Python API share: groups with their defaults, limits, and checks that raise
UsageError."""

import operator
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.errors import UsageError, nearest

MINIMUM = {"batch_size": 1, "block_size": 1, "checkpoint": 0, "limit": 1, "max_new_tokens": 1, "seed": 0, "top_k": 1}


@dataclass(frozen=True)
class Source:
    """What to load: a run, an adapter, or a model. With a run or an adapter, `model` is the path of its base model."""

    run: str | None = None
    adapter: str | None = None
    model: str | None = None
    checkpoint: str = "best"
    root: str = "runs"


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen."""

    max_new_tokens: int = 200
    temperature: float = 0.8
    """0 always takes the most likely token."""
    top_k: int | None = 50
    seed: int = 0
    top_p: float | None = None
    """Sample from the most likely tokens whose probabilities add up to this."""


@dataclass(frozen=True)
class ClusterPlace:
    """A cluster and a namespace, chosen as for kubectl. None: those of the current context."""

    namespace: str | None = None
    kubeconfig: str | None = None
    context: str | None = None


def as_integer(name: str, value: object) -> int:
    """An int, or an integer of numpy, that is not below its minimum."""
    lowest = MINIMUM[name]
    try:
        number = operator.index(value)  # type: ignore[arg-type]
        if number >= lowest and not isinstance(value, bool):
            return number
    except TypeError:
        pass
    raise UsageError(f"{name} must be an integer of at least {lowest}, got {value!r}.")


def as_number(name: str, value: Any) -> float:
    """An int or float, or a number of numpy; text is not converted."""
    if isinstance(value, str | bytes | bool):
        return float("nan")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{name} must be a number, got {value!r}.") from None


def as_text(name: str, value: object) -> str:
    """Text, or a path as text; not empty, and without the NUL characters that no file name may have."""
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        if isinstance(text, str) and text and "\0" not in text:
            return text
    raise UsageError(f"{name} must be text or a path, not empty and without NUL characters, got {value!r}.")


def optional_text(name: str, value: object) -> str | None:
    if value is None:
        return None
    return as_text(name, value)


def run_name(name: str, run: object) -> str | None:
    """A Path is always the path of a run directory, text without a slash is an id."""
    text = optional_text(name, run)
    if text and isinstance(run, os.PathLike):
        return str(Path(text).expanduser().absolute())
    return text


def check_one_of(name: str, value: object, known: Iterable[str]) -> None:
    known = list(known)
    if value not in known:
        raise UsageError(f"{name} {value!r} is unknown.{nearest(str(value), known)}", known=known, like=str(value))


def check_overrides(overrides: object) -> None:
    if isinstance(overrides, Mapping) and all(isinstance(field, str) for field in overrides):
        return
    if isinstance(overrides, list | tuple) and all(map(_is_override, overrides)):
        return
    raise UsageError(
        f"overrides must be a dict of fields or a list of texts, got {overrides!r:.200}.",
        remedy="Such as {'trainer.lr': 1e-3} or ['trainer.lr=1e-3'].",
    )


def _is_override(value: object) -> bool:
    """`trainer.lr=1e-3`, or ("trainer.lr", 1e-3)"""
    if isinstance(value, tuple) and len(value) == 2:
        return isinstance(value[0], str)
    return isinstance(value, str)


def check_callable(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise UsageError(f"{name} must be a function, got {value!r}.")


def check_event(name: str, value: object) -> None:
    if value is not None and not callable(getattr(value, "is_set", None)):
        raise UsageError(f"{name} must be a threading.Event, got {value!r}.")
