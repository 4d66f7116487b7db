"""All checkpoints of a run. A checkpoint directory gets its name when it is complete, and not before.

checkpoints/step_20/   one checkpoint (see checkpoint.py)
checkpoints/latest     the name of the newest one;  checkpoints/best  of the best one
"""

import errno
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import save_file

from llmtrain.checkpoint.checkpoint import FORMAT_VERSION, INDEX, STATE, Checkpoint
from llmtrain.checkpoint.replace import replace_directory
from llmtrain.checkpoint.shards import Index, Shard, file_name, merge_indexes
from llmtrain.checkpoint.state import Tensors
from llmtrain.config.best_metric import is_better
from llmtrain.core.fault_injection import inject_fault
from llmtrain.core.files import (
    RESERVE_BYTES,
    file_sha256,
    fsync_dir,
    open_text,
    use_default_mode,
    write_atomic,
    write_synced,
)
from llmtrain.core.logs import log, warn
from llmtrain.distributed.control_group import ControlGroup
from llmtrain.errors import CheckpointError
from llmtrain.models.base import WriteInto
from llmtrain.runs.checksums import CHECKSUMS, POINTERS, checksums_text, step_of
from llmtrain.runs.lock import Lock

T = TypeVar("T")
REMOVED = "removed.jsonl"
"""File in checkpoints/: which checkpoints trainer.keep_checkpoints has removed, and when."""


@dataclass(frozen=True)
class CheckpointRequest:
    """One checkpoint to save."""

    step: int
    tensors: dict[str, Tensors]
    """Tensors by group, `model` and `optimizer`. They may be the live tensors of the run."""
    state: dict[str, Any]
    """Content of state.json."""
    write_extra_files: WriteInto | None = None
    """Called on rank 0 with the directory of the checkpoint, perhaps in a background thread."""
    epoch: int | None = None
    """Number of the epoch that ends with this step."""


class CheckpointStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._scores: dict[int, tuple[str, float] | None] = {}  # by step, each read once

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        steps = (step_of(path.name) for path in self.folder.iterdir())
        return sorted(step for step in steps if step is not None)

    def at(self, step: int) -> Checkpoint:
        return Checkpoint(self.folder / f"step_{step}")

    def newest_usable(self) -> Checkpoint | None:
        """The newest intact checkpoint; None if there are none at all. Damaged ones are reported and skipped. If all
        are damaged, CheckpointError: starting from scratch would hide the loss."""
        steps = self.steps()
        for step in reversed(steps):
            checkpoint = self.at(step)
            try:
                checkpoint.verify()
            except CheckpointError as problem:
                warn("SAVE", f"skipping a damaged checkpoint: {problem.what}")
                continue
            return checkpoint
        if steps:
            raise CheckpointError(
                f"None of the {len(steps)} checkpoints in {self.folder} is usable.",
                remedy="Restore one from a backup, or start a new run.",
            )
        return None

    def pointed(self, pointer: str) -> Checkpoint | None:
        """The checkpoint that `latest` or `best` names."""
        try:
            with open_text(self.folder / pointer) as file:
                name = file.read().strip()
        except (OSError, ValueError):  # ValueError: not UTF-8
            return None
        if step_of(name) is None or not (self.folder / name).is_dir():
            return None
        return Checkpoint(self.folder / name)

    def best(self) -> Checkpoint | None:
        """The existing checkpoint with the best value of trainer.best_metric; the earlier one of two equal ones. An
        evaluation whose checkpoint was not written, or was deleted, does not count. Nor does one by another metric than
        that of the newest."""
        scores = [(step, score) for step in self.steps() if (score := self._score(step)) is not None]
        best: int | None = None
        best_value: float | None = None
        for step, (metric, value) in scores:
            if metric == scores[-1][1][0] and is_better(metric, value, best_value):
                best = step
                best_value = value
        return None if best is None else self.at(best)

    def _score(self, step: int) -> tuple[str, float] | None:
        if step not in self._scores:
            try:
                self._scores[step] = self.at(step).score
            except CheckpointError:  # damaged; reported when it is used
                self._scores[step] = None
        return self._scores[step]

    def save(self, request: CheckpointRequest, shards: list[Shard], lock: Lock, control: ControlGroup) -> None:
        """Write a checkpoint; every rank calls this and writes its own files. Rank 0 checks the lock just before the
        checkpoint gets its name. A failure on one rank is raised on all, and leaves nothing behind."""
        # The token keeps the files of two generations apart, in case a live process was declared lost.
        temporary = self.folder / f".tmp-step_{request.step}-{lock.token}"
        self._scores.pop(request.step, None)  # the same step may be saved again after its evaluation
        needed = sum(control.gather(sum(shard.byte_count for shard in shards)))
        try:
            control.on_rank0(lambda: self._begin(temporary, needed, request.step))
            written = control.gather_results(lambda: _write_shards(temporary, shards, request.step, control))
            control.on_rank0(lambda: self._complete(temporary, request, written, lock))
        finally:
            if control.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)

    def _begin(self, temporary: Path, needed: int, step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        free = shutil.disk_usage(self.folder).free
        if free < needed + RESERVE_BYTES:
            sizes = f"{needed / 1e6:.1f} MB and a reserve of {RESERVE_BYTES / 1e6:.1f} MB are needed"
            raise OSError(errno.ENOSPC, f"No space left on device: {sizes}, {free / 1e6:.1f} MB are free")
        temporary.mkdir()
        inject_fault("save_begin", step)

    def _complete(self, temporary: Path, request: CheckpointRequest, written: list["_Written"], lock: Lock) -> None:
        """Write index, state and checksums, then rename the directory to its final name."""
        step = request.step
        files: dict[str, Any] = {}
        for part in written:
            files |= part.files
        if request.write_extra_files is not None:
            request.write_extra_files(temporary)
            extra = sorted(temporary.glob("*/*"))
            for path in extra:
                files[f"{path.parent.name}/{path.name}"] = checksum_entry(path)
            for folder in {path.parent for path in extra}:
                fsync_dir(folder)
        index = merge_indexes([part.index for part in written])
        state = {"format": FORMAT_VERSION, **request.state}
        for name, value in ((INDEX, index), (STATE, state)):
            data = (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
            write_synced(temporary / name, data)
            files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        inject_fault("save_before_manifest", step)
        write_synced(temporary / CHECKSUMS, checksums_text(files).encode())
        fsync_dir(temporary)
        inject_fault("save_before_rename", step)
        lock.check()
        inject_fault("save_published", step)
        target = self.at(step).path
        replace_directory(temporary, target, target.with_name(f".old-{target.name}"), fault_step=step)
        fsync_dir(self.folder)
        inject_fault("save_after_rename", step)

    def point(self, latest: int) -> None:
        """Point `latest` to this step and `best` to the best existing checkpoint."""
        for pointer, checkpoint in (("latest", self.at(latest)), ("best", self.best())):
            if checkpoint is not None and checkpoint.path.is_dir():
                write_atomic(self.folder / pointer, f"{checkpoint.path.name}\n")
            else:
                (self.folder / pointer).unlink(missing_ok=True)

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints and the best one."""
        best = self.best()
        for step in self.steps()[:-keep]:
            if best is None or step != best.step:
                self._discard(self.at(step).path)
                self._record_removal(step, keep)

    def _discard(self, path: Path) -> None:
        # Rename first so that a partial delete never looks like a checkpoint.
        doomed = path.with_name(f".doomed-{path.name}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _record_removal(self, step: int, keep: int) -> None:
        record = {"step": step, "removed_at": time.strftime("%Y-%m-%d %H:%M:%S %z"), "keep_checkpoints": keep}
        with suppress(OSError), (self.folder / REMOVED).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def removal(self, step: int) -> dict[str, Any] | None:
        """When and why `prune` removed the checkpoint of this step; None if it did not."""
        try:
            lines = (self.folder / REMOVED).read_text(encoding="utf-8").splitlines()
            records = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return None
        for record in reversed(records):
            if isinstance(record, dict) and record.get("step") == step:
                return record
        return None

    def set_aside_after(self, step: int) -> None:
        """Rename newer checkpoints, so that the run continues from `step`; their content is kept."""
        for later in self.steps():
            if later > step:
                path = self.at(later).path
                aside = path.with_name(f"superseded-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                log("SAVE", f"{path.name} renamed to {aside.name}: the run continues from step {step}")

    def clean(self) -> None:
        """Undo what a killed process left unfinished: restore a checkpoint that was being replaced, remove partially
        written and partially deleted ones. The caller must own the run's lock."""
        if not self.folder.is_dir():
            return
        for path in self.folder.glob(".old-step_*"):
            before = path.with_name(path.name.removeprefix(".old-"))
            if not before.exists():
                path.rename(before)
        for pattern in (".tmp-*", ".old-*", ".doomed-*", ".*.tmp"):  # the last: from write_json and its like
            for path in list(self.folder.glob(pattern)):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Written:
    """Files that one rank wrote."""

    files: dict[str, Any]
    """Checksum entries by file name."""
    index: dict[str, tuple[str, Index]]
    """File and index entries by group."""


def _write_shards(folder: Path, shards: list[Shard], step: int, control: ControlGroup) -> _Written:
    written = _Written({}, {})
    entries: dict[str, Future[dict[str, Any]]] = {}
    for shard in shards:
        name = file_name(shard.group, control.rank, control.size)
        written.index[shard.group] = (name, shard.entries)
        if shard.tensors:
            try:
                save_file(shard.tensors, folder / name)
            except SafetensorError as problem:  # safetensors also raises this on ENOSPC
                wait(entries.values())
                raise OSError(str(problem)) from None
            use_default_mode(folder / name)
            # Syncing and hashing a file take longer than writing it, so the next one is written meanwhile.
            entries[name] = _in_thread(checksum_entry, folder / name)
        inject_fault("save_model_written", step)
    for name, entry in entries.items():
        written.files[name] = entry.result()
    return written


def checksum_entry(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, once it is on disk."""
    synced = _in_thread(_sync, path)  # waits for the disk, hashing for the CPU
    digest = file_sha256(path)
    synced.result()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _in_thread(function: Callable[[Path], T], path: Path) -> "Future[T]":
    """Call it in a daemon thread. An executor would wait for its threads when the process exits, also for storage that
    hangs, and takes no work once the main thread has ended, which may be before a training in another thread."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function(path))
        except BaseException as problem:
            future.set_exception(problem)

    threading.Thread(target=call, name=f"saver of {path.name}", daemon=True).start()
    return future


def _sync(path: Path) -> None:
    """safetensors does not sync what it writes."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at a path: its directory, a pointer (`latest`, `best`), or `step_N.pt` for step_N."""
    if path.name in POINTERS:
        checkpoint = CheckpointStore(path.parent).pointed(path.name)
        if checkpoint is None:
            raise CheckpointError(f"{path} does not name an existing checkpoint.")
        return checkpoint
    plain = path.with_suffix("") if path.suffix == ".pt" else path
    if path.suffix == ".pt" and path.is_file() and not plain.is_dir():
        raise CheckpointError(
            f"{path} is a pickle file, which can run code when it is loaded; llmtrain does not load pickle files.",
            remedy="Pass a checkpoint directory, such as runs/<run_id>/checkpoints/step_20.",
        )
    step = step_of(plain.name)
    if step is not None and plain.is_dir():
        return Checkpoint(plain)
    removed = CheckpointStore(plain.parent).removal(step) if step is not None else None
    if removed:
        raise CheckpointError(
            f"{path} was removed on {removed.get('removed_at')}, because trainer.keep_checkpoints was "
            f"{removed.get('keep_checkpoints')}.",
            remedy="Resume from an existing checkpoint (`llmtrain runs show` lists them). To keep every checkpoint of "
            "a run, set trainer.keep_checkpoints to all.",
        )
    raise CheckpointError(
        f"{path} is not a checkpoint.", remedy="Pass runs/<run_id>/checkpoints/step_<N>, or a run id."
    )
