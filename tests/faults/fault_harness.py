"""Runs training in forked children, so that it can be killed, stopped and starved while torch is imported once.

    child = start(config, fault="after_optimizer:3:0:kill")
    ended = child.wait()        # ended.code is what `llmtrain train` would end with; -9 for SIGKILL

The parent never trains: a child forked from it has one thread, and torch uses one (run.threads is 1 everywhere).
"""

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmtrain.config.document import Document
from llmtrain.config.load import build_config
from llmtrain.config.schema import Config
from llmtrain.errors import LlmtrainError
from llmtrain.runs.metrics import read_metrics
from llmtrain.training.checkpoint import Checkpoint, CheckpointStore
from llmtrain.training.run import run_training

torch.set_num_threads(1)
torch.use_deterministic_algorithms(False)  # imports the compiler, which each child would do again

RUN_ID = "tiny"
STEPS = 8
SAVE_EVERY = 2
SAVE_STEPS = (2, 4, 6, 8)
EVAL_STEPS = (4, 8)
CRASHED = 1
TIMEOUT_SEC = 60.0


def tiny_config(root: Path, cache: Path, **changes: Any) -> Config:
    """A GPT small enough to train in a fraction of a second; changes are `section__field=value`."""
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "tiny", "seed": 7, "device": "cpu", "threads": 1},
        "model": {
            "name": "gpt",
            "block_size": 16,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 2,
            "dropout": 0.1,
        },
        "data": {"name": "dummy_text", "cache_dir": str(cache)},
        "trainer": {
            "max_steps": STEPS,
            "micro_batch_size": 2,
            "grad_accum_steps": 2,
            "lr": 3e-3,
            "warmup_steps": 2,
            "log_every_steps": 1,
            "eval_every_steps": 4,
            "eval_batches": 3,
            "save_every_steps": SAVE_EVERY,
        },
        "output": {"root_dir": str(root), "run_id": RUN_ID},
    }
    for name, value in changes.items():
        section, field = name.split("__")
        values.setdefault(section, {})[field] = value
    return build_config(Document("test", {"schema_version": 2, **values}))


@dataclass(frozen=True)
class Ended:
    code: int
    """Exit code, or minus the signal that ended it."""
    output: str
    """Standard output and error together."""
    result: dict[str, Any] | None
    seconds: float


@dataclass
class Child:
    pid: int
    folder: Path
    started: float
    ended: bool = False

    def wait(self, timeout: float = TIMEOUT_SEC) -> Ended:
        status = self._await(timeout, options=0)
        self.ended = True
        code = os.waitstatus_to_exitcode(status)
        result = self.folder / "result.json"
        return Ended(
            code,
            self.output(),
            json.loads(result.read_text()) if code == 0 and result.exists() else None,
            time.monotonic() - self.started,
        )

    def wait_stopped(self, timeout: float = TIMEOUT_SEC) -> None:
        """Until the child has stopped itself with SIGSTOP."""
        status = self._await(timeout, options=os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self.ended = True
            raise AssertionError(f"the child ended with {os.waitstatus_to_exitcode(status)}:\n{self.output()}")

    def wait_for(self, condition: Callable[[], bool], timeout: float = TIMEOUT_SEC) -> None:
        """Until something is true while the child lives."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert os.waitpid(self.pid, os.WNOHANG) == (0, 0), f"the child ended:\n{self.output()}"
            assert time.monotonic() < deadline, f"waited {timeout} s:\n{self.output()}"
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def _await(self, timeout: float, options: int) -> int:
        deadline = time.monotonic() + timeout
        while True:
            pid, status = os.waitpid(self.pid, options | os.WNOHANG)
            if pid:
                return status
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self.ended = True
                raise AssertionError(f"the child did not end within {timeout} s:\n{self.output()}")
            time.sleep(0.005)


_children: list[Child] = []


def start(
    config: Config,
    resume: str | None = None,
    *,
    fault: str | None = None,
    allow_config_change: bool = False,
    env: dict[str, str] | None = None,
    before: Callable[[], None] | None = None,
    after: Callable[[], dict[str, Any]] | None = None,
) -> Child:
    """Train in a child. `before` runs in it first; what `after` returns is added to the result."""
    root = Path(config.output.root_dir)
    folder = root.parent / f"child-{len(_children)}"
    folder.mkdir(parents=True)
    (folder / "output").touch()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = CRASHED
        try:
            _redirect(folder / "output")
            os.environ.pop("LLMTRAIN_FAULT", None)
            os.environ.update(env or {})
            if fault:
                os.environ["LLMTRAIN_FAULT"] = fault
            code = _train(config, resume, allow_config_change, folder, before, after)
        finally:
            sys.stderr.flush()
            os._exit(code)
    child = Child(pid, folder, time.monotonic())
    _children.append(child)
    return child


def run(config: Config, resume: str | None = None, **options: Any) -> Ended:
    return start(config, resume, **options).wait()


def end_all() -> None:
    """Kill what a failed test left behind."""
    for child in _children:
        if not child.ended:
            child.send(signal.SIGKILL)
            os.waitpid(child.pid, 0)
            child.ended = True


def _redirect(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # The objects of pytest's capture must not be flushed here: what they hold is the parent's.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115


def _train(
    config: Config,
    resume: str | None,
    allow_config_change: bool,
    folder: Path,
    before: Callable[[], None] | None,
    after: Callable[[], dict[str, Any]] | None,
) -> int:
    """Exit codes as cli.main gives them."""
    try:
        if before:
            before()
        result = run_training(config, resume, allow_config_change)
        if after:
            result = {**result, **after()}
        (folder / "result.json").write_text(json.dumps(result))
        return 0
    except LlmtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BaseException:
        traceback.print_exc()
        return CRASHED


# What a run left behind, in a form that can be compared.


@dataclass(frozen=True)
class Outcome:
    """All that must be equal between an undisturbed run and one that was disturbed and resumed."""

    state_sha256: str
    steps: int
    train: list[tuple[int, tuple[str, ...]]]
    """(step, loss, lr, gradient norm and tokens as float.hex), in the order of the file."""
    val: list[tuple[int, str]]
    first_train_loss: str
    final_train_loss: str
    final_val_loss: str
    best_val_loss: str
    best_step: int
    latest: str
    best: str


def outcome(root: Path, result: dict[str, Any]) -> Outcome:
    folder = root / result["run_id"]
    return Outcome(
        state_sha256=result["state_sha256"],
        steps=result["steps"],
        train=train_rows(folder),
        val=val_rows(folder),
        first_train_loss=result["first_train_loss"].hex(),
        final_train_loss=result["final_train_loss"].hex(),
        final_val_loss=result["final_val_loss"].hex(),
        best_val_loss=result["best_val_loss"].hex(),
        best_step=result["best_step"],
        latest=(folder / "checkpoints" / "latest").read_text().strip(),
        best=(folder / "checkpoints" / "best").read_text().strip(),
    )


def train_rows(folder: Path) -> list[tuple[int, tuple[str, ...]]]:
    names = ("train/loss", "train/lr", "train/grad_norm", "train/tokens")
    return [
        (row["step"], tuple(float(row[name]).hex() for name in names))
        for row in read_metrics(folder / "metrics.jsonl")
        if "train/loss" in row
    ]


def val_rows(folder: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["val/loss"].hex()) for row in read_metrics(folder / "metrics.jsonl") if "val/loss" in row]


def checkpoints(root: Path, run_id: str = RUN_ID) -> list[Checkpoint]:
    store = CheckpointStore(root / run_id / "checkpoints")
    return [store.at(step) for step in store.steps()]


def steps_saved(root: Path, run_id: str = RUN_ID) -> list[int]:
    return CheckpointStore(root / run_id / "checkpoints").steps()


def verify_all(root: Path, run_id: str = RUN_ID) -> None:
    found = checkpoints(root, run_id)
    assert found
    for checkpoint in found:
        checkpoint.verify()


def tree(folder: Path, without: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Every file below a folder with its content; `without` names top-level entries to leave out. The lock of a
    killed owner is left out too: whoever comes next takes it over and lets it go."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock" and path.relative_to(folder).parts[0] not in without
    }


def copy_root(root: Path, to: Path) -> Path:
    shutil.copytree(root, to, symlinks=True)
    return to


def read_result(root: Path, run_id: str = RUN_ID) -> dict[str, Any]:
    """The result that the finished marker keeps."""
    return dict(json.loads((root / run_id / "finished.json").read_text()))
