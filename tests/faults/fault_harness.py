"""Runs training in children of the fork server, so that tests can kill, stop and starve it.

child = start(config, fault="after_optimizer:3:0:kill")
ended = child.wait()        # ended.code is the exit code of `llmtrain train`; -9 for SIGKILL

world = start_world(config, 2, fault="after_backward:3:1:kill")
ends = world.wait()         # one ChildExit per rank
"""

import functools
import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

import fork_server
from limits import limit, wait_until
from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.document import Document
from llmtrain.config.load import build_config
from llmtrain.config.schema import Config
from llmtrain.errors import LlmtrainError
from llmtrain.models import device_precision
from llmtrain.runs.metrics import read_metrics
from llmtrain.training import eval_prompts
from llmtrain.training.run import run_training

RUN_ID = "tiny"
STEPS = 8
SAVE_EVERY = 2
SAVE_STEPS = (2, 4, 6, 8)
EVAL_STEPS = (4, 8)
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
    overrides = [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in changes.items()]
    return build_config(Document("test", {"schema_version": 3, **values}), overrides)


def world_config(root: Path, cache: Path, **changes: Any) -> Config:
    """A run that is bit-exact on 1, 2 and 4 processes and detects a dead peer quickly."""
    values = {
        "trainer__grad_accum_steps": 4,
        "distributed__reproducible_reduce": True,
        "distributed__timeout_sec": round(limit(20)),
        "distributed__join_timeout_sec": round(limit(30)),
        **changes,
    }
    if values.get("distributed__strategy") == "fsdp":
        values["distributed__reproducible_reduce"] = False
    return tiny_config(root, cache, **values)


@dataclass(frozen=True)
class ChildExit:
    code: int
    """Exit code, or the negative signal number."""
    output: str
    """Standard output and error together."""
    result: dict[str, Any] | None
    error: dict[str, Any]
    """LlmtrainError.as_dict; empty if it raised none."""
    seconds: float


@dataclass
class Child:
    process: BaseProcess
    folder: Path
    started: float

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def wait(self, timeout: float = TIMEOUT_SEC) -> ChildExit:
        self.process.join(limit(timeout))
        ended = self.poll()
        if ended is None:
            self.end()
            raise AssertionError(f"the child did not end within {limit(timeout):.0f} s:\n{self.output()}")
        return ended

    def poll(self) -> ChildExit | None:
        """How it exited; None while it runs."""
        code = self.process.exitcode
        if code is None:
            return None
        result, error = self.folder / "result.json", self.folder / "error.json"
        return ChildExit(
            code,
            self.output(),
            json.loads(result.read_text()) if code == 0 and result.exists() else None,
            json.loads(error.read_text()) if error.exists() else {},
            time.monotonic() - self.started,
        )

    def wait_stopped(self, timeout: float = TIMEOUT_SEC) -> None:
        """Wait until the child has sent itself SIGSTOP."""
        self.wait_for(lambda: fork_server.is_stopped(self.pid), timeout)

    def wait_for(self, condition: Callable[[], bool], timeout: float = TIMEOUT_SEC) -> None:
        """Wait for a condition while the child runs."""

        def is_so() -> bool:
            is_true = condition()
            code = self.process.exitcode
            assert is_true or code is None, f"the child ended with {code}:\n{self.output()}"
            return is_true

        wait_until(is_so, timeout, self.output)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        fork_server.end(self.process)

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")


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
    """Train in a child. `before` runs in the child first; the values that `after` returns are added to the result."""
    root = Path(config.output.root_dir)
    folder = root.parent.absolute() / f"child-{len(_children)}"  # the child may change its directory
    folder.mkdir(parents=True)
    (folder / "output").touch()
    body = functools.partial(_child, config, resume, allow_config_change, folder, fault, env or {}, before, after)
    child = Child(fork_server.start(body), folder, time.monotonic())
    _children.append(child)
    return child


def run(config: Config, resume: str | None = None, **options: Any) -> ChildExit:
    return start(config, resume, **options).wait()


@dataclass
class StartedWorld:
    """The ranks of a run, each a child."""

    ranks: list[Child]

    def __getitem__(self, rank: int) -> Child:
        return self.ranks[rank]

    def wait(self, timeout: float = TIMEOUT_SEC) -> list[ChildExit]:
        """Until every rank has exited; none may leave processes behind."""
        began = time.monotonic()
        found: dict[int, ChildExit] = {}
        while len(found) < len(self.ranks):
            for rank, child in enumerate(self.ranks):
                if rank not in found and (ended := child.poll()):
                    found[rank] = ended
            if time.monotonic() > began + limit(timeout):
                missing = [rank for rank in range(len(self.ranks)) if rank not in found]
                raise AssertionError(f"ranks {missing} did not end within {limit(timeout):.0f} s:\n{self.output()}")
            time.sleep(0.005)
        for child in self.ranks:
            assert not is_group_alive(child.pid), "a rank left a process behind"
        return [found[rank] for rank in range(len(self.ranks))]

    def wait_for(self, condition: Callable[[], bool], timeout: float = TIMEOUT_SEC) -> None:
        self.ranks[0].wait_for(condition, timeout)

    def send(self, number: signal.Signals) -> None:
        for child in self.ranks:
            child.send(number)

    def stop(self, stopped: int | None = None) -> None:
        """Send SIGSTOP to every rank and wait for it; `stopped` is a rank that has stopped itself."""
        for rank, child in enumerate(self.ranks):
            if rank != stopped:
                child.send(signal.SIGSTOP)
            child.wait_stopped()

    def output(self) -> str:
        return "\n".join(f"--- rank {rank}\n{child.output()}" for rank, child in enumerate(self.ranks))


def start_world(
    config: Config,
    size: int,
    resume: str | None = None,
    *,
    fault: str | None = None,
    env: dict[str, str] | None = None,
    before: Callable[[int], None] | None = None,
) -> StartedWorld:
    """Train with `size` processes over gloo. Each calls `before` with its rank first."""
    port = str(free_port())
    ranks = []
    for rank in range(size):
        process = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        first = functools.partial(before, rank) if before else None
        ranks.append(start(config, resume, fault=fault, env={**process, **(env or {})}, before=first))
    return StartedWorld(ranks)


def run_world(config: Config, size: int, resume: str | None = None, **options: Any) -> list[ChildExit]:
    return start_world(config, size, resume, **options).wait()


def emulate_bf16() -> None:
    """Compute in bf16 even on a CPU without instructions for it, slowly and without torch's warnings."""
    if not device_precision.has_bf16(torch.device("cpu")):
        device_precision.has_bf16 = lambda _: True
        torch.backends.mkldnn.set_flags(_enabled=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_group_alive(leader: int, within: float = 10.0) -> bool:
    """Whether a process group still has members after `within` seconds."""
    began = time.monotonic()
    while time.monotonic() < began + limit(within):
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.01)
    return True


def end_all() -> None:
    """Kill processes that a failed test left behind."""
    for child in _children:
        child.end()


def _child(
    config: Config,
    resume: str | None,
    allow_config_change: bool,
    folder: Path,
    fault: str | None,
    env: dict[str, str],
    before: Callable[[], None] | None,
    after: Callable[[], dict[str, Any]] | None,
) -> int:
    """Train and write the result or the error to a file. Exit codes are those of cli.main."""
    os.setpgrp()  # so that the parent can check for remaining processes
    fork_server.redirect(folder / "output", folder / "output")
    for name in ("LLMTRAIN_FAULT", "LLMTRAIN_NODE", "TORCHELASTIC_RESTART_COUNT"):
        os.environ.pop(name, None)
    os.environ.update(env, **({"LLMTRAIN_FAULT": fault} if fault else {}))
    eval_prompts.SAMPLE_TOKENS = 4  # the sample would take half of the time of a run this small
    try:
        if before:
            before()
        result = run_training(config, resume, allow_config_change).as_dict()
        if after:
            result = {**result, **after()}
        (folder / "result.json").write_text(json.dumps(result))
        return 0
    except LlmtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        (folder / "error.json").write_text(json.dumps(error.as_dict()))
        return error.exit_code
    except BaseException:
        traceback.print_exc()
        return fork_server.CRASHED


# The files of a run, in a form that can be compared.


@dataclass(frozen=True)
class Outcome:
    """Everything that must be equal between an uninterrupted run and one that was interrupted and resumed."""

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


def resume_and_check(config: Config, size: int, golden: Outcome, resume: str = RUN_ID, **options: Any) -> int:
    """Resume to the end with `size` processes; must match the uninterrupted run. Returns the step it resumed from."""
    root = Path(config.output.root_dir)
    ends = run_world(config, size, resume, **options)
    assert [ended.code for ended in ends] == [0] * size, "\n".join(ended.output for ended in ends)
    result = ends[0].result
    assert result is not None
    assert outcome(root, result) == golden
    verify_all(root)
    leftovers = [path.name for path in (root / RUN_ID / "checkpoints").iterdir() if path.name.startswith(".")]
    assert leftovers == [], leftovers
    assert not (root / RUN_ID / "lock").exists()
    return result["resumed_from"] or 0


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
    """Every file below a directory with its content, without the top-level entries in `without`. The lock of a killed
    owner is ignored too: the next owner takes it over and removes it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock" and path.relative_to(folder).parts[0] not in without
    }


def copy_root(root: Path, to: Path) -> Path:
    shutil.copytree(root, to, symlinks=True)
    return to


def read_result(root: Path, run_id: str = RUN_ID) -> dict[str, Any]:
    """The result in finished.json."""
    return dict(json.loads((root / run_id / "finished.json").read_text()))
