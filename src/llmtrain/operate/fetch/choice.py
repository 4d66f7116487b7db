"""Which files of a run directory are fetched, and how. Paths are relative to the run directory."""

from pathlib import Path
from typing import Literal

from llmtrain.runs import checksums
from llmtrain.runs.directory import RunDirectory

Only = Literal["all", "best", "metrics", "logs"]

_NAMES = RunDirectory(Path())
META = _NAMES.meta.name
GENERATIONS = _NAMES.generations.name
FINISHED = _NAMES.finished.name
REPORT = _NAMES.report.name
CHECKPOINTS = _NAMES.checkpoints.name
POINTERS = {pointer: f"{CHECKPOINTS}/{pointer}" for pointer in checksums.POINTERS}
IDENTITY = (META, GENERATIONS, _NAMES.config.name)  # fetched first: they identify the run

_NEVER = {_NAMES.lock.name, _NAMES.heartbeats.name}  # only meaningful to the processes that write them
_APPENDED = {_NAMES.metrics.name, _NAMES.logs.name}
_MODEL_FILES = {_NAMES.tokenizer.name, _NAMES.model_config.name, _NAMES.adapter.name}
_SELECTED: dict[str, set[str]] = {
    "best": {*IDENTITY, *_MODEL_FILES, _NAMES.metrics.name, _NAMES.artifacts.name, FINISHED, CHECKPOINTS, REPORT},
    "metrics": {*IDENTITY, _NAMES.metrics.name, FINISHED, REPORT},
    "logs": {*IDENTITY, _NAMES.logs.name},
}


def is_selected(path: str, only: Only) -> bool:
    """False for files private to the run's processes and for incomplete files, whose names begin with a dot."""
    parts = path.split("/")
    if any(part.startswith(".") for part in parts) or parts[0] in _NEVER:
        return False
    return only == "all" or parts[0] in _SELECTED[only]


def is_plain(path: str) -> bool:
    """Whether it is fetched as a single file: neither part of a checkpoint nor the file that marks the run finished."""
    return path.split("/")[0] not in (CHECKPOINTS, FINISHED)


def is_appended(path: str) -> bool:
    """Whether lines are appended to it while the run is active."""
    return path.split("/")[0] in _APPENDED


def is_link(path: str) -> bool:
    """Whether it is in best/ or epoch-N/, which share files with checkpoints."""
    first = path.split("/")[0]
    return first == _NAMES.best.name or first.startswith("epoch-")


def checkpoint_of(path: str) -> str | None:
    """`step_20` for a file of that checkpoint; None for other files and for superseded checkpoints."""
    parts = path.split("/")
    if parts[0] != CHECKPOINTS or len(parts) < 3 or checksums.step_of(parts[1]) is None:
        return None
    return parts[1]
