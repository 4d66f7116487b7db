"""Deleting runs, or their older checkpoints. A run that is being written, or that another run needs, is kept."""

import re
import secrets
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.runs.checksums import POINTERS, is_intact
from llmtrain.runs.directory import RunDirectory, list_runs
from llmtrain.runs.json_values import dictionary
from llmtrain.runs.lock import RunLock, is_held
from llmtrain.runs.state import EndStatus, RunState
from llmtrain.runs.view import RunView

_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DOOMED = ".doomed-"


@dataclass(frozen=True)
class Criteria:
    """Which runs to delete: those that meet all that is set."""

    names: tuple[str, ...] = ()
    older_than_sec: float | None = None
    keep: int | None = None
    """Keep this many of the newest."""
    failed: bool = False

    def is_empty(self) -> bool:
        return not (self.names or self.failed) and self.older_than_sec is None and self.keep is None


@dataclass(frozen=True)
class Candidate:
    run: RunDirectory
    paths: list[Path]
    """What to delete: the run directory, or checkpoints in it."""
    bytes: int
    reason: str | None = None
    """Why it is kept; None: it can be deleted."""

    def as_dict(self) -> dict[str, Any]:
        names = [path.name for path in self.paths if path != self.run.path]
        return {"run_id": self.run.run_id, "bytes": self.bytes, "checkpoints": names, "kept_because": self.reason}


@dataclass
class Pruned:
    deleted: list[Candidate] = field(default_factory=list)
    kept: list[Candidate] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(candidate.bytes for candidate in self.deleted)


def parse_age(text: str) -> float:
    """`12h` -> 43200.0 seconds; units: m, h, d, w."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([mhdw])", text.strip())
    if not match:
        raise UsageError(f"--older-than must be a number and m, h, d or w, such as 30d, got '{text}'.")
    return float(match[1]) * _UNITS[match[2]]


def select_runs(root: str, criteria: Criteria) -> list[RunDirectory]:
    """The runs that meet the criteria, oldest first."""
    runs = list_runs(root)
    if criteria.names:
        runs = [run for run in runs if run.run_id in criteria.names]
    if criteria.older_than_sec is not None:
        limit = time.time() - criteria.older_than_sec
        runs = [run for run in runs if (RunView(run).last_written or time.time()) < limit]
    if criteria.failed:
        runs = [run for run in runs if _has_failed(run)]
    if criteria.keep is not None:
        runs = runs[: max(0, len(runs) - criteria.keep)]
    return runs


def plan_prune(root: str, runs: Iterable[RunDirectory], only_checkpoints: bool) -> Pruned:
    """What would be deleted and kept."""
    needed = {} if only_checkpoints else _origins_in_use(root)
    plan = Pruned()
    for run in runs:
        paths = _old_checkpoints(run) if only_checkpoints else [run.path]
        if not paths:
            continue
        reason = _reason_to_keep(run, needed)
        candidate = Candidate(run, paths, _size(paths), reason)
        (plan.kept if reason else plan.deleted).append(candidate)
    return plan


def delete(plan: Pruned) -> Pruned:
    """Delete what is planned, each under the run's lock: a run that was started meanwhile is kept."""
    done = Pruned(kept=list(plan.kept))
    for candidate in plan.deleted:
        try:
            with RunLock(candidate.run.lock) as lock:
                for path in candidate.paths:
                    # Rename first, so that a partial delete never looks like a run or a checkpoint.
                    doomed = path.with_name(f"{_DOOMED}{path.name}-{secrets.token_hex(4)}")
                    path.rename(doomed)
                    if path == candidate.run.path:
                        lock.follow(doomed / lock.path.name)
                    shutil.rmtree(doomed, ignore_errors=True)
                    if doomed.exists():  # files of another user
                        raise OSError(f"some of its files cannot be deleted; they are in {doomed}")
        except (LlmtrainError, OSError) as problem:
            reason = problem.what if isinstance(problem, LlmtrainError) else str(problem.strerror or problem)
            done.kept.append(Candidate(candidate.run, candidate.paths, candidate.bytes, reason))
        else:
            done.deleted.append(candidate)
    return done


def remove_leftovers(root: str) -> None:
    """Finish what a killed prune began."""
    for path in Path(root).expanduser().glob(f"{_DOOMED}*"):
        shutil.rmtree(path, ignore_errors=True)


def _reason_to_keep(run: RunDirectory, needed: dict[str, str]) -> str | None:
    if is_held(run.lock):
        return "it is running"
    if run.path.is_symlink():
        return "it is a symbolic link; delete its target yourself"
    if str(run.path.absolute()) in needed:
        return f"run '{needed[str(run.path.absolute())]}' starts from its weights and has no checkpoint yet"
    return None


def _origins_in_use(root: str) -> dict[str, str]:
    """Path of a run -> the run that starts from its weights and has no checkpoint yet."""
    found = {}
    for run in list_runs(root):
        view = RunView(run)
        path = dictionary(view.meta.get("origin")).get("checkpoint")
        if isinstance(path, str) and not view.checkpoint_names:
            found[str(Path(path).parents[1])] = run.run_id
    return found


def _has_failed(run: RunDirectory) -> bool:
    """Whether the last start of an unfinished run crashed or ended with an error."""
    view = RunView(run)
    if view.state not in (RunState.FAILED, RunState.KILLED):
        return False
    return bool(view.generations) and view.last_start.get("ended") != EndStatus.REFUSED  # nothing was trained


def _old_checkpoints(run: RunDirectory) -> list[Path]:
    """All checkpoints but the newest, the newest that is intact, and the best; with them those that a resume from an
    earlier one set aside, if an intact one remains."""
    view = RunView(run)
    names = view.checkpoint_names
    intact = next((name for name in reversed(names) if is_intact(run.checkpoints / name)), None)
    if names and intact is None:
        return []  # any of them may still be of use
    kept = {*names[-1:], intact, *(view.pointed(pointer) for pointer in POINTERS)}
    aside = sorted(run.checkpoints.glob("superseded-step_*"))
    return [*(run.checkpoints / name for name in names if name not in kept), *aside]


def _size(paths: Iterable[Path]) -> int:
    """Bytes of the files below; a file with several hard links counts once."""
    seen: dict[tuple[int, int], int] = {}
    for top in paths:
        for path in (top, *top.rglob("*")):
            try:
                status = path.lstat()
            except OSError:
                continue
            seen[status.st_dev, status.st_ino] = status.st_size if path.is_file() else 0
    return sum(seen.values())
