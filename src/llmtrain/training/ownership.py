"""Owning a run while it is written: its directory, its lock, and the number of this start (its generation)."""

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress

from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.schema import Config
from llmtrain.distributed.world import World
from llmtrain.env import NODE
from llmtrain.errors import DataError, Interrupted, LlmtrainError, PeerLost, UsageError
from llmtrain.files import is_full, write_json
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.exit_report import has_crashed_peer, report_to_run, set_position
from llmtrain.runs.generations import begin_generation, end_generation
from llmtrain.runs.lock import STALE_AFTER_SEC, Lock, NullLock, RunLock, is_held
from llmtrain.training.origin import Origin
from llmtrain.training.resume import Resumption

ExitCallback = Callable[[type[BaseException] | None, BaseException | None, object], None]


def is_unattended() -> bool:
    """Whether `llmtrain node` started this process, and may restart it without a person watching."""
    return os.environ.get(NODE) == "1"


def is_restart() -> bool:
    """Whether an elastic agent, torchrun's or that of `node`, restarted this process after a crash."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def may_be_restarted() -> bool:
    """Whether the platform of `llmtrain node` or an elastic agent restarts this process after a crash."""
    return is_unattended() or is_restart() or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


class RunOwnership:
    """What this start owns of the run; released when `stack` closes. Every rank calls the same methods."""

    def __init__(self, stack: ExitStack, run: RunDirectory, world: World, is_new: bool) -> None:
        self._stack, self._run, self._world, self._is_new = stack, run, world, is_new
        self._lock: Lock | None = None
        self._generation: int | None = None
        self._is_provisional = True
        self.origin: Origin | None = None
        """Recorded with the directory of a new run."""

    def acquire(self) -> Lock:
        """Create the directory of a new run and take the lock, once."""
        if self._lock is None:
            if self._is_new:
                self._create()
            self._lock = self._take_lock()
        return self._lock

    def begin_generation(self, config: Config, resumption: Resumption | None) -> int:
        """Number this start, once. From here on a process that ends without recording why has crashed, and crashes are
        counted; an interrupted start, or one refused for a usage error, is not a crash."""
        if self._generation is None:
            lock = self.acquire()
            step = resumption.checkpoint.step if resumption and resumption.checkpoint else 0
            is_again = is_unattended() or is_restart()
            world, run, threads = self._world, self._run, config.run.threads
            self._generation = world.control.on_rank0(
                lambda: begin_generation(run, step, world.world_size, is_again, threads=threads)
            )
            set_position(generation=self._generation)
            report_to_run(run.exits)
            if world.is_first:
                self._stack.push(_end_generation_on_exit(run, lock, self._generation, step))
        return self._generation

    def keep(self) -> None:
        """From here on the directory of a new run stays, however this start ends."""
        self._is_provisional = False

    def _create(self) -> None:
        run, world, origin = self._run, self._world, self.origin
        world.control.on_rank0(lambda: _create_directory(run, origin))
        if world.is_first:
            self._stack.push(lambda _, error, __: _remove_if_empty(run) if is_full(error) else None)
            self._stack.push(self._remove_provisional)

    def _remove_provisional(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Remove a directory that was created early only to count crashes, unless this start crashed."""
        is_crash = (
            isinstance(error, PeerLost)
            or has_crashed_peer()
            or (kind and issubclass(kind, Exception) and not _is_expected(error))
        )
        if self._is_provisional and error is not None and not is_crash and not self._run.lock.exists():
            with suppress(OSError):
                for path in (self._run.generations, self._run.meta, self._run.path / ".lock.guard"):
                    path.unlink(missing_ok=True)
                self._run.path.rmdir()

    def _take_lock(self) -> Lock:
        """Rank 0 holds the lock; the other ranks know its token. An unattended start supersedes the current owner."""
        own: list[RunLock] = []

        def take() -> str:
            # After a restart the lock may belong to a rank 0 that died on another node: wait until it is stale.
            wait_sec = STALE_AFTER_SEC + 5 if is_restart() else 0.0
            lock = RunLock(self._run.lock, supersede=is_unattended(), wait_sec=wait_sec)
            own.append(self._stack.enter_context(lock))
            return lock.token

        token = self._world.control.on_rank0(take)
        return own[0] if own else NullLock(token)


def owns_run(lock: Lock) -> bool:
    """Whether no other process has taken over the run."""
    try:
        lock.check()
    except Interrupted:  # superseded, or the lock cannot be read
        return False
    return True


def _create_directory(run: RunDirectory, origin: Origin | None) -> None:
    try:
        run.create()
        if origin:
            write_json(run.meta, {"origin": origin.as_dict()})
    except UsageError:
        if not is_unattended() or not run.exists():
            raise
        raise PeerLost(
            f"Another start of run '{run.run_id}' created its directory at the same time.",
            remedy="Restart this process: it resumes that run.",
        ) from None


def _remove_if_empty(run: RunDirectory) -> None:
    """Remove a new run directory that has no checkpoint and no metrics yet."""
    has_metrics = run.metrics.is_file() and run.metrics.stat().st_size
    if not has_metrics and not CheckpointStore(run.checkpoints).steps() and not is_held(run.lock):
        shutil.rmtree(run.path, ignore_errors=True)


def _is_expected(error: BaseException | None) -> bool:
    """Whether an error is not a crash: a usage error, bad data, or an interruption."""
    codes = (UsageError.exit_code, DataError.exit_code, Interrupted.exit_code)
    return isinstance(error, LlmtrainError) and error.exit_code in codes


def _end_generation_on_exit(run: RunDirectory, lock: Lock, generation: int, step: int) -> ExitCallback:
    def end(kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, LlmtrainError) and error.exit_code == UsageError.exit_code:
            status = "refused"
        elif isinstance(error, PeerLost) or (error and has_crashed_peer()):
            status = "failed"
        elif isinstance(error, Interrupted) or (kind and not issubclass(kind, Exception)):
            status = "stopped"
        else:
            status = "failed" if error else "finished"
        if owns_run(lock):
            with suppress(OSError):
                end_generation(run, generation, status, step)

    return end
