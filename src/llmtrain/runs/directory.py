"""The run directory. The names of its files are defined here only.

runs/<run_id>/
  config.yaml      resolved config
  meta.json        versions, machine, git commit, command line
  metrics.jsonl    one row per logged step
  logs/            log files
  tokenizer/       tokenizer for generate and eval
  model_config/    of a fine-tuned model: config.json of the base model
  checkpoints/     step_N/, and the pointers `latest` and `best`
  adapter/         of a LoRA run: the best adapter, in the format of peft
  samples/         answers to trainer.eval_prompts, one file per evaluation
  tasks/           scores on tasks, one file per checkpoint that was scored
  epoch-N/ best/   with output.layout epochs: files of those checkpoints
  artifacts.json   which of adapter/, epoch-N/ and best/ the run has written; others with these names are the user's
  finished.json    result of a finished run
  report.html      curves and facts of a finished run, for a browser
  ended.json       launch that ended, and its exit code, for pods that are recreated afterwards
  lock             the process that writes
  generations.json every start of the run, and how it ended
  heartbeats/      progress of each rank, and the node that started last
"""

import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from llmtrain.config.section import RUN_ID_PATTERN
from llmtrain.core.files import RESERVE_BYTES, disk_full, is_full, is_there, read_json
from llmtrain.core.redact import redact
from llmtrain.core.text import format_bytes
from llmtrain.errors import LlmtrainError, UsageError, nearest


@dataclass(frozen=True)
class RunDirectory:
    path: Path
    given: Path | None = field(default=None, compare=False)
    """The path as the user wrote it, if `path` was made absolute."""

    def absolute(self) -> "RunDirectory":
        """The same directory wherever the program changes to; messages and results show the path as before."""
        return RunDirectory(self.path.absolute(), self.given or self.path)

    def shown(self, path: Path | None = None) -> Path:
        """How messages and results write this directory, or a path inside it."""
        return (self.given or self.path) / (path or self.path).relative_to(self.path)

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def meta(self) -> Path:
        return self.path / "meta.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def model_config(self) -> Path:
        return self.path / "model_config"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def task_scores(self) -> Path:
        return self.path / "tasks"

    @property
    def best(self) -> Path:
        return self.path / "best"

    def epoch(self, number: int) -> Path:
        return self.path / f"epoch-{number}"

    @property
    def artifacts(self) -> Path:
        return self.path / "artifacts.json"

    @property
    def finished(self) -> Path:
        return self.path / "finished.json"

    @property
    def ended(self) -> Path:
        return self.path / "ended.json"

    @property
    def exits(self) -> Path:
        """Exit reports of the processes of this run."""
        return self.path / "exits"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def generations(self) -> Path:
        return self.path / "generations.json"

    @property
    def heartbeats(self) -> Path:
        return self.path / "heartbeats"

    @property
    def mlflow(self) -> Path:
        return self.path / "mlflow.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def wandb(self) -> Path:
        """The id of the W&B run; W&B itself writes to the directory `wandb`."""
        return self.path / "wandb.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def exists(self) -> bool:
        """Follows a link to a run on another disk. (Links inside a run are not followed.)"""
        try:
            return self.path.is_dir()
        except OSError:  # the parent directory may not be read
            return False

    def create(self) -> None:
        """Create the directory; it must not exist."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
        except FileExistsError:
            raise _already_exists(self) from None
        except OSError as problem:
            raise _unwritable(self.path.parent, problem) from None


def new_run_id(name: str) -> str:
    """A unique run id from a name, the time and four random characters."""
    slug = re.sub(r"[^a-z0-9]+", "-", redact(name).lower()).strip("-")
    slug = re.sub(r"^[^a-z]+", "", slug)[:19].strip("-") or "run"
    return f"{slug}-{time.strftime('%y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def check_run_id(run_id: str) -> None:
    if not re.fullmatch(RUN_ID_PATTERN, run_id):
        raise UsageError(
            f"Run id {run_id!r} must be 2 to 40 lowercase letters, digits and hyphens, and start with a letter.",
            remedy="Choose another run id, such as my-run.",
        )


def new_run(root: str, run_id: str | None, name: str) -> RunDirectory:
    """The directory of a new run, checked but not created."""
    run_id = run_id or new_run_id(name)
    check_run_id(run_id)
    run = RunDirectory(Path(root).expanduser() / run_id)
    if is_there(run.path):
        raise _already_exists(run)
    check_writable(run.path.parent)
    return run


def find_run(root: str, reference: str) -> RunDirectory:
    """A run by id inside root, or by the path of its directory."""
    path = Path(reference).expanduser()
    if len(path.parts) > 1 or path.is_absolute():
        run = RunDirectory(Path(os.path.abspath(path)))  # noqa: PTH100 (the name of a link, not of its target)
        if run.exists() and (run.checkpoints.is_dir() or run.config.is_file() or run.meta.is_file()):
            return run
        raise UsageError(f"{reference} is not a run directory.", remedy="Pass a run id or the path of a run.")
    check_run_id(reference)
    run = RunDirectory(Path(root).expanduser() / reference)
    if not run.exists():
        known = [other.run_id for other in list_runs(root)]
        raise UsageError(
            f"There is no run '{reference}' in {root}.{nearest(reference, known)}",
            remedy="`llmtrain runs list` lists the runs. Select another directory with --root, or for train with --set "
            "output.root_dir=...",
        )
    return run


def local_run_hint(run_id: str, root: str = "runs") -> str | None:
    """What to do instead if a run that was looked for on a cluster is one of this machine."""
    if run_id not in [run.run_id for run in list_runs(root)]:
        return None
    return (
        f"'{run_id}' is a local run: see it with `llmtrain runs show {run_id}`, resume it with `llmtrain train "
        f"--resume {run_id}`."
    )


def list_runs(root: str) -> list[RunDirectory]:
    """Runs by the time of their first start."""
    directory = Path(root).expanduser()
    try:
        names = [path.name for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as problem:
        raise UsageError(f"Cannot read {directory}: {problem.strerror or problem}.") from None
    runs = []
    for name in names:
        run = RunDirectory(directory / name)
        with suppress(OSError):  # deleted meanwhile, or not readable
            files = (run.meta, run.config)  # either may be disabled in the config
            is_run = run.checkpoints.is_dir() or any(path.is_file() for path in files)
            if re.fullmatch(RUN_ID_PATTERN, name) and run.exists() and is_run:
                runs.append((*_started(run), name, run))
    return [run for *_, run in sorted(runs, key=lambda row: row[:3])]


def _started(run: RunDirectory) -> tuple[float, float]:
    """When a run was started first: as recorded, in seconds, and by the time of its file, which a copy changes."""
    modified = (run.meta if run.meta.is_file() else run.path).stat().st_mtime
    meta = read_json(run.meta)
    try:
        recorded = datetime.fromisoformat(meta["started_at"]).timestamp()
    except (TypeError, KeyError, ValueError, OverflowError):  # no meta.json, or a damaged one
        recorded = modified
    return recorded, modified


def check_writable(directory: Path) -> None:
    """Raise an error now rather than after minutes of data preparation."""
    existing = next(path for path in (directory, *directory.absolute().parents) if is_there(path))
    try:
        probe = existing / f".llmtrain-{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
    except OSError as problem:
        raise _unwritable(directory, problem) from None
    free = shutil.disk_usage(existing).free
    if free < RESERVE_BYTES:
        needed = format_bytes(RESERVE_BYTES)
        raise disk_full(directory, f"{format_bytes(free)} are free, but a run needs {needed} besides its checkpoints")


def _already_exists(run: RunDirectory) -> UsageError:
    if not run.exists():
        return UsageError(
            f"{run.path} already exists and is not a directory.", remedy="Remove it, or choose another output.run_id."
        )
    return UsageError(
        f"Run '{run.run_id}' already exists in {run.path.parent}.",
        remedy=f"Resume it with --resume {run.run_id}, or start another run with --set output.run_id=NEW (null: "
        "a new name).",
    )


def _unwritable(directory: Path, problem: OSError) -> LlmtrainError:
    if is_full(problem):
        return disk_full(directory, problem.strerror or str(problem))
    return UsageError(
        f"Cannot write to {directory}: {problem.strerror or problem}.",
        remedy="Set output.root_dir to a directory you may write to.",
        reason="not_writable",
    )
