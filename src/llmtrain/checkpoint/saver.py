"""Saves checkpoints during training: while the loop waits, or in a background thread from a copy in memory."""

import threading
import time
from collections.abc import Callable
from typing import Literal

import torch

from llmtrain.checkpoint.artifacts import Artifacts
from llmtrain.checkpoint.shards import Shard, shard
from llmtrain.checkpoint.store import CheckpointRequest, CheckpointStore
from llmtrain.core.fault_injection import inject_fault
from llmtrain.core.logs import log, warn
from llmtrain.distributed.world import World
from llmtrain.runs.lock import Lock


class Saver:
    """One save at a time. Every rank calls the same methods at the same steps, so all agree on whether it succeeded."""

    def __init__(
        self,
        store: CheckpointStore,
        lock: Lock,
        world: World,
        keep: int | Literal["all"],
        in_background: bool,
        artifacts: Artifacts | None = None,
        on_first_save: Callable[[], None] = lambda: None,
    ) -> None:
        """Rank 0 calls `on_first_save` once the first checkpoint is complete."""
        self._store = store
        self._lock = lock
        self._world = world
        self._keep = keep
        self._in_background = in_background
        self._artifacts = artifacts
        self._on_first_save = on_first_save
        self._has_saved = False
        self._copies: dict[tuple[str, str], torch.Tensor] = {}  # (group, name) -> buffer on the CPU
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None

    def save(self, request: CheckpointRequest, is_last: bool = False) -> None:
        """Save a checkpoint, or start to. Errors are raised by `finish`, which must be called before the next save.
        `is_last`: nothing is trained meanwhile, so it allocates no memory for a copy."""
        started = time.perf_counter()
        world = self._world
        shards = [shard(name, tensors, world.rank, world.world_size) for name, tensors in request.tensors.items()]
        if self._in_background and (self._copies or not is_last):
            shards = [self._copy(each) for each in shards]
            note = f", in the background ({time.perf_counter() - started:.2f} s to copy)"
            self._thread = threading.Thread(target=self._write, args=(request, shards, note), name="saver", daemon=True)
            self._thread.start()
        else:
            self._write(request, shards, "")

    def finish(self) -> None:
        """Wait for the save in progress and raise its error, if any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._problem is not None:
            problem = self._problem
            self._problem = None  # raised once
            raise problem

    def _write(self, request: CheckpointRequest, shards: list[Shard], note: str) -> None:
        started = time.perf_counter()
        step = request.step
        try:
            self._store.save(request, shards, self._lock, self._world.saving)
            if self._world.is_first:
                self._publish(request)
            log("SAVE", f"step_{step} in {time.perf_counter() - started:.2f} s{note}", fields={"step": step})
        except Exception as problem:
            self._problem = problem

    def _publish(self, request: CheckpointRequest) -> None:
        """Update pointers and artifacts, and prune old checkpoints. The checkpoint is complete: failures only warn."""
        step = request.step
        self._lock.check()
        try:
            if not self._has_saved:
                self._on_first_save()
                self._has_saved = True
            self._store.point(step)
            self._publish_artifacts(request)
            inject_fault("save_before_prune", step)
            self._lock.check()
            if self._keep != "all":
                self._store.prune(self._keep)
        except OSError as problem:
            warn("SAVE", f"step_{step} is saved, but the pointers or old checkpoints could not be updated: {problem}")

    def _publish_artifacts(self, request: CheckpointRequest) -> None:
        if self._artifacts is None:
            return
        try:
            self._artifacts.publish(request.step, request.epoch)
        except OSError as problem:
            warn("SAVE", f"step_{request.step} is saved, but the artifacts could not be updated: {problem}")

    def _copy(self, original: Shard) -> Shard:
        """A copy on the CPU, in buffers that are reused from save to save."""
        copies = {}
        for name, tensor in original.tensors.items():
            buffer = self._copies.get((original.group, name))
            if buffer is None or buffer.shape != tensor.shape:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._copies[original.group, name] = buffer
            copies[name] = buffer.copy_(tensor, non_blocking=True)
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)  # the next step overwrites what is copied
        return Shard(original.group, copies, original.entries)
