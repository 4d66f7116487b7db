"""Saving while training: in the loop's own time, or in the background from a copy in memory."""

import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from llmtrain.checkpoint.shards import Shard, shard
from llmtrain.checkpoint.state import model_tensors, optimizer_tensors
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.distributed.world import World
from llmtrain.fault_injection import inject_fault
from llmtrain.logs import log, warn
from llmtrain.models.base import WriteInto
from llmtrain.runs.lock import NullLock


class Saver:
    """One save at a time. Every rank calls the same methods at the same steps, so all agree on how a save ended."""

    def __init__(
        self,
        store: CheckpointStore,
        lock: NullLock,
        world: World,
        keep: int | Literal["all"],
        in_background: bool,
        note_saved: Callable[[], None] = lambda: None,
    ) -> None:
        """`note_saved` records, outside of the store, that it has a checkpoint; rank 0 calls it after the first."""
        self._store, self._lock, self._world, self._keep = store, lock, world, keep
        self._note_saved, self._is_noted = note_saved, False
        self._in_background = in_background
        self._copies: dict[tuple[str, str], torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None

    def save(
        self,
        step: int,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        companion: WriteInto | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a checkpoint, or begin to. What goes wrong is raised by `finish`, which has to be called before the
        next save. `companion` writes more files into it, `after` is called once it is complete, both by rank 0."""
        started = time.perf_counter()
        groups = {"model": model_tensors(module), "optimizer": optimizer_tensors(module, optimizer)}
        shards = [shard(name, tensors, self._world.rank, self._world.world_size) for name, tensors in groups.items()]
        if self._in_background:
            shards = [self._copy(each) for each in shards]
            waited = time.perf_counter() - started
            how = f", in the background ({waited:.2f} s to copy)"
            write = self._writing(step, shards, state, companion, after, how)
            self._thread = threading.Thread(target=write, name="saver", daemon=True)
            self._thread.start()
        else:
            self._writing(step, shards, state, companion, after, "")()

    def finish(self) -> None:
        """Wait for the save that was begun, and raise what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def _writing(
        self,
        step: int,
        shards: list[Shard],
        state: dict[str, Any],
        companion: WriteInto | None,
        after: Callable[[], None],
        how: str,
    ) -> Callable[[], None]:
        def write() -> None:
            started = time.perf_counter()
            try:
                self._store.save(step, shards, state, self._lock.token, self._lock.check, self._world.saving, companion)
                if self._world.is_first:
                    self._point_and_prune(step, after)
                log("SAVE", f"step_{step} in {time.perf_counter() - started:.2f} s{how}", fields={"step": step})
            except Exception as problem:
                self._problem = problem

        return write

    def _point_and_prune(self, step: int, after: Callable[[], None]) -> None:
        """Housekeeping after a checkpoint is complete; when it fails nothing is lost."""
        self._lock.check()
        try:
            if not self._is_noted:
                self._note_saved()
                self._is_noted = True
            self._store.point(step)
            self._extras(step, after)
            inject_fault("save_before_prune", step)
            self._lock.check()
            if self._keep != "all":
                self._store.prune(self._keep)
        except OSError as problem:
            warn("SAVE", f"step_{step} is saved, but the pointers or old checkpoints could not be updated: {problem}")

    def _extras(self, step: int, after: Callable[[], None]) -> None:
        try:
            after()
        except OSError as problem:
            warn("SAVE", f"step_{step} is saved, but what is laid out besides could not be: {problem}")

    def _copy(self, original: Shard) -> Shard:
        """A copy on the CPU, into memory that is kept from save to save."""
        targets = {}
        for name, tensor in original.tensors.items():
            copy = self._copies.get((original.group, name))
            if copy is None or copy.shape != tensor.shape:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._copies[original.group, name] = copy
            targets[name] = copy.copy_(tensor, non_blocking=True)
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return Shard(original.group, targets, original.entries)
