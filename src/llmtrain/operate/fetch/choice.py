"""Which files of a run directory are fetched, and how they are treated. Paths are relative to the directory."""

from pathlib import Path
from typing import Literal

from llmtrain.runs import manifest
from llmtrain.runs.directory import RunDirectory

Only = Literal["all", "best", "metrics", "logs"]

_NAMES = RunDirectory(Path())
META = _NAMES.meta.name
GENERATIONS = _NAMES.generations.name
FINISHED = _NAMES.finished.name
CHECKPOINTS = _NAMES.checkpoints.name
POINTERS = {pointer: f"{CHECKPOINTS}/{pointer}" for pointer in manifest.POINTERS}
WHO = (META, GENERATIONS, _NAMES.config.name)  # first: they say whose directory it is

_NEVER = {_NAMES.lock.name, _NAMES.heartbeats.name}  # of the processes that write it
_GROWING = {_NAMES.metrics.name, _NAMES.logs.name}
_OF_A_MODEL = {_NAMES.tokenizer.name, _NAMES.model_config.name, _NAMES.adapter.name}
_WANTED: dict[str, set[str]] = {
    "best": {*WHO, *_OF_A_MODEL, _NAMES.metrics.name, _NAMES.artifacts.name, FINISHED, CHECKPOINTS},
    "metrics": {*WHO, _NAMES.metrics.name, FINISHED},
    "logs": {*WHO, _NAMES.logs.name},
}


def is_wanted(path: str, only: Only) -> bool:
    """Not what processes of the run keep for themselves, nor what is half-written (such names begin with a dot)."""
    parts = path.split("/")
    if any(part.startswith(".") for part in parts) or parts[0] in _NEVER:
        return False
    return only == "all" or parts[0] in _WANTED[only]


def is_plain(path: str) -> bool:
    """Comes as it is: neither of a checkpoint nor what says that the run is complete."""
    return path.split("/")[0] not in (CHECKPOINTS, FINISHED)


def is_growing(path: str) -> bool:
    """Lines are added to it while the run goes on."""
    return path.split("/")[0] in _GROWING


def is_link(path: str) -> bool:
    """In best/ or epoch-N/, which hold the very files of checkpoints."""
    first = path.split("/")[0]
    return first == _NAMES.best.name or first.startswith("epoch-")


def checkpoint_of(path: str) -> str | None:
    """step_20 of a file in that checkpoint; None for other files, and for what was set aside."""
    parts = path.split("/")
    is_inside = parts[0] == CHECKPOINTS and len(parts) > 2 and manifest.step_of(parts[1]) is not None
    return parts[1] if is_inside else None
