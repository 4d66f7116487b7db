"""Ranks of one run as forked children: torch is imported once, a launch costs a fraction of a second.

    results = values(run_ranks(2, lambda world: world.control.sum(world.rank)))     # inside a joined world
    ended = train_ranks(config, 2)                                                 # ended[0].value is the run's result
"""

import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import fault_harness as harness
import torch.distributed.fsdp
import torch.nn.parallel  # noqa: F401 (before the fork: each child would import it again)

from llmtrain.config.schema import Config, DistributedSection, RunSection
from llmtrain.distributed.world import World, join_world
from llmtrain.errors import LlmtrainError
from llmtrain.training.run import run_training

LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    code: int
    """Exit code, or minus the signal that ended it."""
    value: Any
    error: tuple[str, str, int] | None
    """Class, text and exit code of the LlmtrainError it ended with."""
    output: str
    seconds: float


@dataclass
class Ranks:
    pids: list[int]
    folder: Path
    started: float
    status: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def wait(self, timeout: float = 90.0) -> list[RankEnd]:
        deadline = time.monotonic() + timeout
        while len(self.status) < len(self.pids):
            for rank, pid in enumerate(self.pids):
                if rank not in self.status:
                    found, status = os.waitpid(pid, os.WNOHANG)
                    if found:
                        self.status[rank], self.seconds[rank] = status, time.monotonic() - self.started
            if time.monotonic() > deadline:
                self.end_all()
                said = "\n".join(f"--- rank {rank}\n{self.output(rank)}" for rank in range(len(self.pids)))
                raise AssertionError(f"the ranks did not end within {timeout} s:\n{said}")
            time.sleep(0.005)
        return [self._ended(rank) for rank in range(len(self.pids))]

    def output(self, rank: int) -> str:
        return (self.folder / f"output-{rank}").read_text(errors="replace")

    def end_all(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.status:
                os.kill(pid, signal.SIGKILL)
                self.status[rank], self.seconds[rank] = os.waitpid(pid, 0)[1], 0.0

    def _ended(self, rank: int) -> RankEnd:
        path = self.folder / f"value-{rank}"
        value, error = pickle.loads(path.read_bytes()) if path.exists() else (None, None)
        code = os.waitstatus_to_exitcode(self.status[rank])
        return RankEnd(rank, code, value, error, self.output(rank), self.seconds[rank])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_ranks(count: int, body: Callable[[int], Any], env: dict[str, str] | None = None) -> Ranks:
    """Every rank calls body(rank), with a launcher's environment; what it returns must be picklable."""
    folder, port = Path(mkdtemp(prefix="ranks-")), free_port()
    sys.stdout.flush()
    sys.stderr.flush()
    pids = []
    for rank in range(count):
        (folder / f"output-{rank}").touch()
        pid = os.fork()
        if pid == 0:
            code = harness.CRASHED
            try:
                harness._redirect(folder / f"output-{rank}")
                for name in LAUNCHER_NAMES:
                    os.environ.pop(name, None)
                if count > 1:
                    os.environ.update(
                        RANK=str(rank),
                        WORLD_SIZE=str(count),
                        LOCAL_RANK=str(rank),
                        LOCAL_WORLD_SIZE=str(count),
                        MASTER_ADDR="127.0.0.1",
                        MASTER_PORT=str(port),
                    )
                os.environ.update(env or {})
                code = _live(folder / f"value-{rank}", body, rank)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    return Ranks(pids, folder, time.monotonic())


def _live(to: Path, body: Callable[[int], Any], rank: int) -> int:
    """Exit codes as cli.main gives them."""
    try:
        to.write_bytes(pickle.dumps((body(rank), None)))
        return 0
    except LlmtrainError as error:
        to.write_bytes(pickle.dumps((None, (type(error).__name__, str(error), error.exit_code))))
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BaseException:
        traceback.print_exc()
        return harness.CRASHED


def in_world(body: Callable[[World], Any], **distributed: Any) -> Callable[[int], Any]:
    """body(world) between joining and parting."""

    def joined(_: int) -> Any:
        section = DistributedSection(**{"strategy": "ddp", "timeout_sec": 30, **distributed})
        with join_world(section, RunSection(device="cpu")) as world:
            return body(world)

    return joined


def run_ranks(count: int, body: Callable[[World], Any], **distributed: Any) -> list[RankEnd]:
    return start_ranks(count, in_world(body, **distributed)).wait()


def values(ended: list[RankEnd]) -> list[Any]:
    """What every rank returned; none may have failed."""
    assert [end.code for end in ended] == [0] * len(ended), "\n".join(end.output for end in ended)
    return [end.value for end in ended]


def train_ranks(
    config: Config,
    count: int,
    resume: str | None = None,
    *,
    env: dict[str, str] | None = None,
    before: Callable[[], None] | None = None,
    after: Callable[[], Any] | None = None,
    timeout: float = 90.0,
) -> list[RankEnd]:
    """A run with so many ranks. The value of rank 0 is the run's result; with `after`, every rank's is what it says."""

    def body(_: int) -> Any:
        if before:
            before()
        result = run_training(config, resume)
        return after() if after else result

    return start_ranks(count, body, env).wait(timeout)


def trained(config: Config, count: int, resume: str | None = None, **options: Any) -> dict[str, Any]:
    """The result of a run that must finish."""
    result = values(train_ranks(config, count, resume, **options))[0]
    assert isinstance(result, dict)
    return result
