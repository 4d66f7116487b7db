"""The files of a sweep. They are all that a driver knows: it may be killed at any point and started again.

runs/<sweep>/
  sweep.json     what was asked for, and the threads per trial; never changes
  trials.json    the trials with their values, and the outcomes so far; replaced after each outcome
  usage.json     seconds and cost of each outcome, which no decision depends on
  code/          the files of --with-code, which all trials are launched with
  configs/       base.json, the config that all trials share, and that of each run that was started, as the user wrote
                 them: they may contain passwords, so only the user reads them
  logs/          what the runs print, a .log and a .json per run
  table.json     the result of a finished sweep
  best.yaml      the config of its best trial, ready to train
  lock           the driver that writes
runs/<sweep>-<N>/       trial N, a run as any other
runs/<sweep>-<N>-s<K>/  the same config with another seed
"""

import re
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmtrain.config.section import RUN_ID_PATTERN
from llmtrain.core.files import fsync_dir, is_there, read_json, write_json
from llmtrain.errors import CheckpointError, UsageError, nearest
from llmtrain.launch.code_bundle import CodeBundle, bundle_sha256
from llmtrain.runs.directory import RunDirectory
from llmtrain.sweep.trials import Trial

FINISHED = "finished"
DIVERGED = "diverged"
FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """How a run ended at a rung. Equal for equal runs: no times, no paths."""

    status: str
    """FINISHED, DIVERGED or FAILED."""
    step: int
    score: float | None
    """The metric at this step; None if it diverged or failed."""
    tokens: int | None
    state_sha256: str | None
    reason: str | None = None
    """Why it diverged or failed."""

    @property
    def is_finished(self) -> bool:
        return self.status == FINISHED


@dataclass
class SweepState:
    """trials.json."""

    trials: list[Trial]
    outcomes: dict[str, list[Outcome]]
    """Run id -> its outcomes, one per rung in order."""

    def outcome(self, run_id: str, rung: int) -> Outcome | None:
        found = self.outcomes.get(run_id, [])
        return found[rung] if rung < len(found) else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "trials": [trial.as_dict() for trial in self.trials],
            "outcomes": {run_id: [asdict(each) for each in rows] for run_id, rows in sorted(self.outcomes.items())},
        }


@dataclass(frozen=True)
class SweepDirectory:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def root(self) -> Path:
        return self.path.parent

    @property
    def spec(self) -> Path:
        return self.path / "sweep.json"

    @property
    def base(self) -> Path:
        return self.path / "configs" / "base.json"

    @property
    def trials(self) -> Path:
        return self.path / "trials.json"

    @property
    def usage(self) -> Path:
        return self.path / "usage.json"

    @property
    def table(self) -> Path:
        return self.path / "table.json"

    @property
    def best(self) -> Path:
        return self.path / "best.yaml"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    def config(self, run_id: str) -> Path:
        return self.path / "configs" / f"{run_id}.yaml"

    def log(self, run_id: str) -> Path:
        return self.path / "logs" / f"{run_id}.log"

    def printed(self, run_id: str) -> Path:
        """What the process of the run printed to standard output: its result or its error, as JSON."""
        return self.path / "logs" / f"{run_id}.json"

    def run(self, run_id: str) -> RunDirectory:
        return RunDirectory(self.root / run_id)

    def is_sweep(self) -> bool:
        try:
            return self.spec.is_file()
        except OSError:
            return False

    def create(
        self,
        spec: dict[str, Any],
        base: dict[str, Any],
        trials: Sequence[Trial],
        code: Mapping[str, bytes] | None = None,
    ) -> None:
        """Create it with its first files, all at once: a directory that exists is complete. `code`: path -> content of
        the files to launch with."""
        partial = self.path.with_name(f".{self.name}.{secrets.token_hex(4)}.tmp")
        try:
            partial.mkdir(parents=True)
            (partial / "logs").mkdir()
            (partial / self.base.parent.name).mkdir(mode=0o700)
            write_json(partial / self.base.parent.name / self.base.name, base)
            write_json(partial / self.spec.name, spec)
            write_json(partial / self.trials.name, SweepState(list(trials), {}).as_dict())
            for name, content in (code or {}).items():
                path = partial / self.code.name / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            if is_there(self.path):
                raise already_exists(self)
            partial.rename(self.path)
        except FileExistsError:
            raise already_exists(self) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        fsync_dir(self.root)

    def read_spec(self) -> dict[str, Any]:
        values = self._read(self.spec, "spec", "trials", "rungs", "config", "threads", "is_launched", "created_at")
        types = {"spec": dict, "trials": int, "rungs": list}
        if not all(isinstance(values[key], kind) for key, kind in types.items()):
            raise _damaged(self.spec)
        return values

    def read_base(self) -> dict[str, Any]:
        return self._read(self.base, "source", "document", "shared")

    def read_state(self) -> SweepState:
        values = self._read(self.trials, "trials", "outcomes")
        try:
            outcomes = {}
            for run_id, rows in values["outcomes"].items():
                outcomes[str(run_id)] = [Outcome(**row) for row in rows]
            state = SweepState([Trial(**row) for row in values["trials"]], outcomes)
            if not _is_sound(state):
                raise _damaged(self.trials)
            return state
        except (KeyError, TypeError, AttributeError):
            raise _damaged(self.trials) from None

    def write_state(self, state: SweepState) -> None:
        write_json(self.trials, state.as_dict())

    def read_code(self, sha256: str) -> CodeBundle:
        """The code that the sweep was started with."""
        found = {}
        with suppress(OSError):
            for path in self.code.rglob("*"):
                if path.is_file():
                    found[path.relative_to(self.code).as_posix()] = path.read_bytes()
        if bundle_sha256(found) != sha256:
            raise _damaged(self.code)
        return CodeBundle(sha256, tuple(sorted(found)), found)

    def read_usage(self) -> dict[str, dict[str, Any]]:
        values = read_json(self.usage)
        return values if isinstance(values, dict) else {}

    def _read(self, path: Path, *keys: str) -> dict[str, Any]:
        values = read_json(path)
        if not isinstance(values, dict) or not values.keys() >= set(keys):
            raise _damaged(path)
        return values


def _is_sound(state: SweepState) -> bool:
    """Whether trials are numbered, and outcomes have numbers where the table computes with them."""
    for index, trial in enumerate(state.trials):
        if trial.number != index or (trial.same_as is not None and not 0 <= trial.same_as < index):
            return False
    outcomes = [each for rows in state.outcomes.values() for each in rows]
    return all(isinstance(each.step, int) and isinstance(each.score, float | int | None) for each in outcomes)


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is missing or damaged.",
        remedy="Restore it from a backup, or start another sweep: llmtrain sweep --name.",
    )


def already_exists(sweep: SweepDirectory) -> UsageError:
    if not sweep.is_sweep():
        return UsageError(f"{sweep.path} already exists and is not a sweep.", remedy="Choose another --name.")
    return UsageError(
        f"Sweep '{sweep.name}' already exists in {sweep.root}.",
        remedy=f"Continue it with: llmtrain sweep --resume {sweep.name}{root_option(sweep)}. Or choose another --name.",
    )


def find_sweep(root: str, name: str) -> SweepDirectory:
    sweep = SweepDirectory(Path(root).expanduser() / name)
    if len(Path(name).parts) > 1:
        sweep = SweepDirectory(Path(name).expanduser())
    elif not re.fullmatch(RUN_ID_PATTERN, name) or not sweep.is_sweep():
        known = [each.name for each in list_sweeps(root)]
        raise UsageError(
            f"There is no sweep '{name}' in {root}.{nearest(name, known)}",
            known=known,
            like=name,
            remedy="Check --root.",
        )
    if not sweep.is_sweep():
        raise UsageError(f"{name} is not a sweep.", remedy="Pass the name of a sweep, or its directory.")
    return sweep


def root_option(sweep: SweepDirectory) -> str:
    """What a command about this sweep needs besides its name."""
    root = str(sweep.root)
    return "" if root == "runs" else f" --root {shlex.quote(root)}"


def list_sweeps(root: str) -> list[SweepDirectory]:
    """By name."""
    found = []
    with suppress(OSError):
        for path in sorted(Path(root).expanduser().iterdir()):
            sweep = SweepDirectory(path)
            if re.fullmatch(RUN_ID_PATTERN, path.name) and sweep.is_sweep():
                found.append(sweep)
    return found
