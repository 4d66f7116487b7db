"""Ranks of one run as forked children: torch is imported once, a launch costs a fraction of a second.

values(run_ranks(2, lambda world: world.control.sum(world.rank)))   # inside a joined world
trained(config, 2)                                                 # the result of a run
start_cli("node", "--", "true").wait()                             # llmtrain's command line
"""

import contextlib
import os
import pickle
import signal
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
from fault_harness import free_port

from llmtrain.config.schema import Config, DistributedSection, RunSection
from llmtrain.distributed.world import World, join_world
from llmtrain.errors import LlmtrainError
from llmtrain.training import run as run_module
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
    allow_config_change: bool = False,
    timeout: float = 90.0,
) -> list[RankEnd]:
    """A run with so many ranks. The value of rank 0 is the run's result; with `after`, every rank's is what it says."""

    def body(_: int) -> Any:
        run_module.SAMPLE_TOKENS = 4  # a sharded model gathers its weights anew for every token
        if before:
            before()
        result = run_training(config, resume, allow_config_change)
        return after() if after else result

    return start_ranks(count, body, env).wait(timeout)


def trained(config: Config, count: int, resume: str | None = None, **options: Any) -> dict[str, Any]:
    """The result of a run that must finish."""
    result = values(train_ranks(config, count, resume, **options))[0]
    assert isinstance(result, dict)
    return result


# llmtrain's command line in a forked child: `llmtrain node` without the seconds that importing torch takes.


@dataclass
class Cli:
    pid: int
    folder: Path
    status: int | None = None

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def is_over(self) -> bool:
        if self.status is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if found else None
        return self.status is not None

    def wait(self, timeout: float = 90.0) -> int:
        """Exit code, or minus the signal that ended it."""
        deadline = time.monotonic() + timeout
        while not self.is_over():
            if time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"it did not end within {timeout} s:\n{self.out}\n{self.err}")
            time.sleep(0.01)
        assert self.status is not None
        return os.waitstatus_to_exitcode(self.status)

    def wait_for(self, condition: Callable[[], bool], timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert not self.is_over(), f"it ended:\n{self.out}\n{self.err}"
            assert time.monotonic() < deadline, f"waited {timeout} s:\n{self.out}\n{self.err}"
            time.sleep(0.02)

    def end(self) -> None:
        if not self.is_over():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.status = os.waitpid(self.pid, 0)[1]


_clis: list[Cli] = []


def start_cli(*words: object, env: dict[str, str] | None = None, cwd: Path | None = None) -> Cli:
    """llmtrain with these words, in a process (and process group) of its own."""
    import torch.distributed.elastic.agent.server.local_elastic_agent  # noqa: F401 (before the fork)

    from llmtrain.cli import main

    folder = Path(mkdtemp(prefix="cli-"))
    for name in ("out", "err"):
        (folder / name).touch()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code: Any = harness.CRASHED
        try:
            os.setpgid(0, 0)
            for descriptor, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(folder / name, os.O_WRONLY | os.O_APPEND), descriptor)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
            for name in LAUNCHER_NAMES:
                os.environ.pop(name, None)
            os.environ.update(env or {})
            if cwd:
                os.chdir(cwd)
            main([str(word) for word in words])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    started = Cli(pid, folder)
    _clis.append(started)
    return started


def end_clis() -> None:
    """Kill what a failed test left behind, workers included."""
    while _clis:
        _clis.pop().end()
