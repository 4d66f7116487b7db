"""Owning a run while it is written: its directory, its lock, and the number of this start (its generation)."""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.output import OutputSection
from llmtrain.core.env import NODE
from llmtrain.core.files import is_full, read_json, write_json
from llmtrain.distributed.world import World
from llmtrain.errors import DataError, Interrupted, LlmtrainError, PeerLost, UsageError
from llmtrain.runs.directory import RunDirectory, new_run
from llmtrain.runs.exit_report import has_crashed_peer, set_position, set_run_exits
from llmtrain.runs.generations import begin_generation, end_generation, has_restored
from llmtrain.runs.lock import STALE_AFTER_SEC, Lock, NullLock, RunLock, is_held
from llmtrain.runs.recorded_config import split_reference
from llmtrain.runs.state import EndStatus
from llmtrain.training.origin import Origin, resolve_origin
from llmtrain.training.resume import Resumption, find_resumed_run, find_resumption

SHARED_STORAGE_SEC = 10.0
"""Network storage may show a new file this late."""
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
        self.run = run
        self.resumption: Resumption | None = None
        """None for a new run."""
        self.origin: Origin | None = None
        """Recorded with the directory of a new run."""
        self._stack = stack
        self._world = world
        self._is_new = is_new
        self._is_provisional = True
        self._lock: Lock | None = None
        self._generation: int | None = None

    def acquire(self) -> Lock:
        """Create the directory of a new run and take the lock, once."""
        if self._lock is None:
            if self._is_new:
                self._create()
            self._lock = self._take_lock()
        return self._lock

    def begin_generation(self, threads: int | None) -> int:
        """Number this start, once. From here on a process that ends without recording why has crashed, and crashes are
        counted; an interrupted start, or one refused for a usage error, is not a crash."""
        if self._generation is None:
            lock = self.acquire()
            resumption = self.resumption
            step = 0
            if resumption and resumption.checkpoint:
                step = resumption.checkpoint.step
            is_again = is_unattended() or is_restart()
            world_size = self._world.world_size
            self._generation = self._world.control.on_rank0(
                lambda: begin_generation(self.run, step, world_size, is_again, threads=threads)
            )
            set_position(generation=self._generation)
            set_run_exits(self.run.exits)
            if self._world.is_first:
                self._stack.push(_end_generation_on_exit(self.run, lock, self._generation, step))
        return self._generation

    def keep(self) -> None:
        """From here on the directory of a new run stays, however this start ends."""
        self._is_provisional = False

    def check_shared_directory(self) -> None:
        """Every rank writes and reads checkpoints, so all must see one run directory."""
        lock = self.acquire()
        deadline = time.monotonic() + SHARED_STORAGE_SEC
        is_visible = _is_visible(self.run, lock)
        while not is_visible and time.monotonic() < deadline:
            time.sleep(0.1)
            is_visible = _is_visible(self.run, lock)
        visible = self._world.control.gather(is_visible)
        if not visible[0]:  # another generation took over the run while data was prepared
            self._world.control.on_rank0(lock.check)
        blind = [str(rank) for rank, sees_it in enumerate(visible) if not sees_it]
        if blind:
            raise UsageError(
                f"Rank {', '.join(blind[:10])} does not see {self.run.shown()}, which rank 0 created.",
                remedy="Set output.root_dir to a directory that all nodes share (a ReadWriteMany volume, NFS).",
            )

    def _create(self) -> None:
        self._world.control.on_rank0(lambda: _create_directory(self.run, self.origin))
        if self._world.is_first:
            self._stack.push(self._remove_if_disk_is_full)
            self._stack.push(self._remove_provisional)

    def _remove_if_disk_is_full(self, _: object, error: BaseException | None, __: object) -> None:
        if is_full(error):
            _remove_if_empty(self.run)

    def _remove_provisional(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Remove a directory that was created early only to count crashes, unless this start crashed."""
        is_crash = _is_of_peer(error) or (kind and issubclass(kind, Exception) and not _is_expected(error))
        if self._is_provisional and error is not None and not is_crash and not self.run.lock.exists():
            with suppress(OSError):
                for path in (self.run.generations, self.run.meta, self.run.path / ".lock.guard"):
                    path.unlink(missing_ok=True)
                self.run.path.rmdir()

    def _take_lock(self) -> Lock:
        """Rank 0 holds the lock; the other ranks know its token. An unattended start supersedes the current owner."""
        own: list[RunLock] = []

        def take() -> str:
            # After a restart the lock may belong to a rank 0 that died on another node: wait until it is stale.
            wait_sec = STALE_AFTER_SEC + 5 if is_restart() else 0.0
            lock = RunLock(self.run.lock, supersede=is_unattended(), wait_sec=wait_sec)
            own.append(self._stack.enter_context(lock))
            return lock.token

        token = self._world.control.on_rank0(take)
        return own[0] if own else NullLock(token)


def open_run(
    output: OutputSection, run_name: str, world: World, stack: ExitStack, resume: str | None, start_from: str | None
) -> RunOwnership:
    """An existing run, locked, with the checkpoint to resume from; or the directory that a new run will get."""
    rank0 = world.control.on_rank0
    if is_restart():
        resume = resume or "auto"
    # A collective, so every rank calls it: after a restart, ranks may differ in `resume`.
    existing = rank0(lambda: find_resumed_run(output, run_name, resume) if resume else None)
    if existing and start_from and is_restart() and not output.run_id:
        is_origin = existing.run_id == Path(split_reference(start_from)[0]).name
        if is_origin:
            existing = None  # this run has not been created yet
    if existing is None:
        run = rank0(lambda: new_run(output.root_dir, output.run_id, run_name)).absolute()
        ownership = RunOwnership(stack, run, world, is_new=True)
    else:
        ownership = RunOwnership(stack, existing.absolute(), world, is_new=False)
        ownership.acquire()  # first: another owner could prune the checkpoint that is chosen next
        ownership.resumption = rank0(lambda: find_resumption(existing, _resume_reference(existing, resume)))
    ownership.origin = rank0(lambda: resolve_origin(output.root_dir, start_from, ownership.resumption))
    return ownership


def _resume_reference(run: RunDirectory, resume: str | None) -> str:
    """What to resume from. After a restart that is the newest checkpoint, once an earlier start by the same command
    has loaded the checkpoint that was named; before that, newer checkpoints are the ones to be replaced."""
    if is_restart() and has_restored(run):
        return "auto"
    return resume or "auto"


def _is_visible(run: RunDirectory, lock: Lock) -> bool:
    """Whether this rank sees the lock that rank 0 has taken."""
    record = read_json(run.lock) or {}
    return bool(record.get("token") == lock.token)


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
    """Whether an error is not a crash: a usage error, an interruption, or what the next start would meet again (exit
    code 65: bad data, a loss of NaN), so that there are no crashes to count."""
    codes = (UsageError.exit_code, DataError.exit_code, Interrupted.exit_code)
    return isinstance(error, LlmtrainError) and error.exit_code in codes


def _is_of_peer(error: BaseException | None) -> bool:
    """Whether this process ends because another one crashed."""
    return isinstance(error, PeerLost) or (error is not None and has_crashed_peer())


def _end_generation_on_exit(run: RunDirectory, lock: Lock, generation: int, step: int) -> ExitCallback:
    def end(kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, LlmtrainError) and error.exit_code == UsageError.exit_code:
            status = EndStatus.REFUSED
        elif _is_of_peer(error):
            status = EndStatus.FAILED
        elif isinstance(error, Interrupted) or (kind and not issubclass(kind, Exception)):
            status = EndStatus.STOPPED
        else:
            status = EndStatus.FAILED if error else EndStatus.FINISHED
        if owns_run(lock):
            with suppress(OSError):
                end_generation(run, generation, status, step)

    return end
