"""Starts the ranks of a run as children of the fork server, in a fraction of a second.

values(run_ranks(2, lambda world: world.control.sum(world.rank)))   # in a joined world
trained(config, 2)                                                 # the result of a run
start_cli("node", "--", "true").wait()                             # llmtrain's command line
"""

import contextlib
import functools
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from fault_harness import free_port

import fork_server
from limits import limit, wait_until
from llmtrain.config.distributed import DistributedSection
from llmtrain.config.run import RunSection
from llmtrain.config.schema import Config
from llmtrain.distributed.world import World, join_world
from llmtrain.errors import LlmtrainError
from llmtrain.training import eval_prompts
from llmtrain.training.run import run_training

LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankExit:
    """How one rank exited."""

    rank: int
    code: int
    """Exit code, or the negative signal number."""
    value: Any
    error: tuple[str, str, int] | None
    """Class, text and exit code of its LlmtrainError."""
    output: str
    seconds: float


@dataclass
class Ranks:
    processes: list[BaseProcess]
    folder: Path
    started: float

    def wait(self, timeout: float = 90.0) -> list[RankExit]:
        seconds: dict[int, float] = {}
        while len(seconds) < len(self.processes):
            for rank, process in enumerate(self.processes):
                if rank not in seconds and process.exitcode is not None:
                    seconds[rank] = time.monotonic() - self.started
            if time.monotonic() > self.started + limit(timeout):
                self.end_all()
                outputs = "\n".join(f"--- rank {rank}\n{self.output(rank)}" for rank in range(len(self.processes)))
                raise AssertionError(f"the ranks did not exit within {limit(timeout):.0f} s:\n{outputs}")
            time.sleep(0.005)
        return [self._ended(rank, seconds[rank]) for rank in range(len(self.processes))]

    def output(self, rank: int) -> str:
        return (self.folder / f"output-{rank}").read_text(errors="replace")

    def end_all(self) -> None:
        for process in self.processes:
            fork_server.end(process)

    def _ended(self, rank: int, seconds: float) -> RankExit:
        path = self.folder / f"value-{rank}"
        value, error = pickle.loads(path.read_bytes()) if path.exists() else (None, None)
        code = self.processes[rank].exitcode
        assert code is not None
        return RankExit(rank, code, value, error, self.output(rank), seconds)


def start_ranks(count: int, body: Callable[[int], Any], env: dict[str, str] | None = None) -> Ranks:
    """Every rank calls body(rank) in the environment of a launcher; the return value must be picklable."""
    folder, port = Path(mkdtemp(prefix="ranks-")), free_port()
    started = time.monotonic()
    processes = []
    for rank in range(count):
        (folder / f"output-{rank}").touch()
        launcher = {
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        variables = {**(launcher if count > 1 else {}), **(env or {})}
        processes.append(fork_server.start(functools.partial(_rank, folder, body, rank, variables)))
    return Ranks(processes, folder, started)


def _rank(folder: Path, body: Callable[[int], Any], rank: int, variables: dict[str, str]) -> int:
    """Exit codes as cli.main gives them."""
    fork_server.redirect(folder / f"output-{rank}", folder / f"output-{rank}")
    _set_launcher(variables)
    to = folder / f"value-{rank}"
    try:
        to.write_bytes(pickle.dumps((body(rank), None)))
        return 0
    except LlmtrainError as error:
        to.write_bytes(pickle.dumps((None, (type(error).__name__, str(error), error.exit_code))))
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BaseException:
        traceback.print_exc()
        return fork_server.CRASHED


def in_world(body: Callable[[World], Any], **distributed: Any) -> Callable[[int], Any]:
    """A body that joins the world and calls body(world)."""
    section = DistributedSection(**{"strategy": "ddp", "timeout_sec": round(limit(30)), **distributed})

    def joined(_: int) -> Any:
        with join_world(section, RunSection(device="cpu")) as world:
            return body(world)

    return joined


def run_ranks(count: int, body: Callable[[World], Any], **distributed: Any) -> list[RankExit]:
    return start_ranks(count, in_world(body, **distributed)).wait()


def values(ended: list[RankExit]) -> list[Any]:
    """The return values of all ranks, none of which may have failed."""
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
) -> list[RankExit]:
    """Train with `count` ranks. Rank 0's value is the result of the run; with `after`, each rank's is its result."""

    def body(_: int) -> Any:
        eval_prompts.SAMPLE_TOKENS = 4  # a sharded model gathers its weights for every token
        if before:
            before()
        result = run_training(config, resume, allow_config_change).as_dict()
        return after() if after else result

    return start_ranks(count, body, env).wait(timeout)


def trained(config: Config, count: int, resume: str | None = None, **options: Any) -> dict[str, Any]:
    """The result of a run that must finish."""
    result = values(train_ranks(config, count, resume, **options))[0]
    assert isinstance(result, dict)
    return result


def _set_launcher(variables: dict[str, str]) -> None:
    for name in LAUNCHER_NAMES:
        os.environ.pop(name, None)
    os.environ.update(variables)


# llmtrain's command line in a child: `llmtrain node` without the seconds that importing torch takes.


@dataclass
class Cli:
    process: BaseProcess
    folder: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def is_over(self) -> bool:
        return self.process.exitcode is not None

    def wait(self, timeout: float = 90.0) -> int:
        """Exit code, or the negative signal number."""
        self.process.join(limit(timeout))
        code = self.process.exitcode
        if code is None:
            self.end()
            raise AssertionError(f"it did not end within {limit(timeout):.0f} s:\n{self.out}\n{self.err}")
        return code

    def wait_for(self, condition: Callable[[], bool], timeout: float = 60.0) -> None:

        def is_so() -> bool:
            is_true = condition()
            assert is_true or not self.is_over(), f"it ended:\n{self.out}\n{self.err}"
            return is_true

        wait_until(is_so, timeout, lambda: f"{self.out}\n{self.err}")

    def end(self) -> None:
        if not self.is_over():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.process.join()


_clis: list[Cli] = []


def start_cli(
    *arguments: object,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    before: Callable[[], None] | None = None,
) -> Cli:
    """llmtrain with these arguments, in its own process and process group, which calls `before` first."""
    folder = Path(mkdtemp(prefix="cli-"))
    for name in ("out", "err"):
        (folder / name).touch()
    body = functools.partial(_main, folder, [str(argument) for argument in arguments], env or {}, cwd, before)
    started = Cli(fork_server.start(body), folder)
    _clis.append(started)
    return started


def _main(
    folder: Path,
    arguments: list[str],
    variables: dict[str, str],
    cwd: Path | None,
    before: Callable[[], None] | None,
) -> int:
    from llmtrain.cli import main

    os.setpgid(0, 0)
    fork_server.redirect(folder / "out", folder / "err")
    _set_launcher(variables)
    if cwd:
        os.chdir(cwd)
    if before:
        before()
    try:
        main(arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    return fork_server.CRASHED


def end_clis() -> None:
    """Kill processes that a failed test left behind, workers included."""
    while _clis:
        _clis.pop().end()
