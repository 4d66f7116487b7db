"""Checkpoints: a directory that exists under its name once it is complete, and is checked before it is used.

    checkpoints/step_20/   model.safetensors  optimizer.safetensors  index.json  state.json  manifest.json
                           adapter/  (of a LoRA run: the same weights in peft's own format)
    checkpoints/latest     the name of the newest one;  checkpoints/best  of the best one

Several processes write a file each (model-00001-of-00002.safetensors); index.json says which tensor lies where.
manifest.json is written last and holds the SHA-256 of every other file and of itself. Nothing here is a pickle:
loading a checkpoint, whoever made it, cannot run code.
"""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from llmtrain.checkpoint.shards import Index, Shard, file_name, merge, read_into, read_whole
from llmtrain.checkpoint.shards import check as check_shards
from llmtrain.checkpoint.state import Tensors, TrainState
from llmtrain.distributed.control_group import ControlGroup
from llmtrain.errors import CheckpointError
from llmtrain.fault_injection import inject_fault
from llmtrain.files import RESERVE_BYTES, file_sha256, fsync_dir, open_text, write_atomic, write_synced
from llmtrain.logs import log, warn
from llmtrain.runs.manifest import MANIFEST, POINTERS, is_entry, is_whole, manifest_text, step_of

FORMAT_VERSION = 2
STATE = "state.json"
INDEX = "index.json"
REMOVED = "removed.jsonl"
"""In checkpoints/: what keep_checkpoints has removed, and when."""
_FILES = {INDEX, STATE}
_GROUPS = ("model", "optimizer")
_UNREADABLE = (OSError, ValueError, TypeError, RecursionError)
_STATE_FIELDS = {"progress": dict, "config": dict, "data_fingerprint": str, "vocab_size": int}


@dataclass(frozen=True)
class Checkpoint:
    path: Path

    @property
    def step(self) -> int:
        return step_of(self.path.name) or 0

    @property
    def val_loss(self) -> float | None:
        """Validation loss of these very weights; None where they were saved before they were evaluated."""
        progress = self.progress()
        return progress.last_val_loss if progress.evaluated_step == self.step else None

    def verify(self) -> None:
        """Raise, naming the file, unless every byte is what was written."""
        files = self._manifest()
        for name, wanted in files.items():
            file = self.path / name
            if file.is_symlink() or not file.is_file():
                raise CheckpointError(f"{file} is missing.")
            try:
                whole = file.stat().st_size == wanted["bytes"] and file_sha256(file) == wanted["sha256"]
            except OSError as problem:
                raise CheckpointError(f"{file} cannot be read: {problem.strerror or problem}.") from None
            if not whole:
                raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one in {MANIFEST}.")
        # Right hashes say who wrote it last, not that it makes sense.
        index = self._index()
        for group in _GROUPS:
            check_shards(self.path, index[group])
        if self.progress().step != self.step:
            raise CheckpointError(f"{self.path} holds step {self.progress().step}, not {self.step}.")

    def progress(self) -> TrainState:
        try:
            return TrainState.from_dict(self.state()["progress"])
        except ValueError as problem:
            raise CheckpointError(f"{self.path / STATE} is wrong about the progress of the run: {problem}.") from None

    def state(self) -> dict[str, Any]:
        path = self.path / STATE
        try:
            state = dict(json.loads(path.read_text(encoding="utf-8")))
        except _UNREADABLE:
            raise CheckpointError(f"{path} cannot be read.") from None
        if state.get("format") != FORMAT_VERSION:
            raise CheckpointError(f"{path} has format {state.get('format')}; this version reads {FORMAT_VERSION}.")
        if not all(isinstance(state.get(name), kind) for name, kind in _STATE_FIELDS.items()):
            raise CheckpointError(f"{path} lacks one of {', '.join(_STATE_FIELDS)}.")
        return state

    def tensors(self, group: str) -> Tensors:
        """All tensors of `model` or `optimizer`, whole, on the CPU."""
        return read_whole(self.path, self._index()[group])

    def read_into(self, group: str, targets: Tensors) -> None:
        """Fill tensors that are there already; of a sharded one, this rank's slice is read."""
        read_into(self.path, self._index()[group], targets)

    def _index(self) -> Index:
        path = self.path / INDEX
        try:
            index = dict(json.loads(path.read_text(encoding="utf-8")))
        except _UNREADABLE:
            raise CheckpointError(f"{path} cannot be read.") from None
        try:
            files = {piece["file"] for group in _GROUPS for entry in index[group].values() for piece in entry["pieces"]}
        except (KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{path} is not an index of {' and '.join(_GROUPS)}.") from None
        strangers = files - self._manifest().keys()  # a path that leads elsewhere is one, too
        if strangers:
            raise CheckpointError(
                f"{path} names files that {MANIFEST} does not: {', '.join(sorted(map(str, strangers)))[:200]}."
            )
        return index

    def _manifest(self) -> dict[str, Any]:
        path = self.path / MANIFEST
        if self.path.is_symlink() or path.is_symlink():
            raise CheckpointError(f"{self.path} is a symbolic link; a checkpoint is a plain directory.")
        try:
            text = path.read_text(encoding="utf-8")
            files = dict(json.loads(text)["files"])
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is not a checkpoint: it has no {MANIFEST}.") from None
        except (*_UNREADABLE, KeyError):
            raise CheckpointError(f"{path} is damaged: it cannot be read.") from None
        if not is_whole(text, files):
            raise CheckpointError(f"{path} is damaged: its own SHA-256 is wrong.")
        if not files.keys() >= _FILES or not all(is_entry(entry) for entry in files.values()):
            raise CheckpointError(f"{path} does not list the files of a checkpoint: {', '.join(sorted(_FILES))}.")
        return files


class CheckpointStore:
    """All checkpoints of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._val_losses: dict[int, float | None] = {}  # of checkpoints there: read once each

    def steps(self) -> list[int]:
        """Steps of the checkpoints there, oldest first. Half-written ones have other names."""
        if not self.folder.is_dir():
            return []
        found = (step_of(path.name) for path in self.folder.iterdir())
        return sorted(step for step in found if step is not None)

    def at(self, step: int) -> Checkpoint:
        return Checkpoint(self.folder / f"step_{step}")

    def newest_usable(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None when there are none at all. Damaged ones are named and passed
        over. When every one is damaged that is an error: starting afresh would hide the loss."""
        steps = self.steps()
        for step in reversed(steps):
            checkpoint = self.at(step)
            try:
                checkpoint.verify()
            except CheckpointError as problem:
                warn("SAVE", f"checkpoint passed over: {problem.what}")
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
        except (OSError, ValueError):  # also where it is not text
            return None
        return Checkpoint(self.folder / name) if step_of(name) is not None and (self.folder / name).is_dir() else None

    def best(self) -> Checkpoint | None:
        """Of the checkpoints there, the one whose own evaluation was the best; the earlier one where two are alike. An
        evaluation whose checkpoint could not be written, or was removed by hand, does not count."""
        losses = {step: loss for step in self.steps() if (loss := self._val_loss(step)) is not None}
        return self.at(min(losses, key=lambda step: (losses[step], step))) if losses else None

    def _val_loss(self, step: int) -> float | None:
        if step not in self._val_losses:
            try:
                self._val_losses[step] = self.at(step).val_loss
            except CheckpointError:  # damaged, which is said when it is used
                self._val_losses[step] = None
        return self._val_losses[step]

    def save(
        self,
        step: int,
        shards: list[Shard],
        state: dict[str, Any],
        owner: str,
        publish: Callable[[], None],
        control: ControlGroup,
        companion: Callable[[Path], None] | None = None,
    ) -> None:
        """Write a checkpoint, every rank its own files. `publish` is called on rank 0 just before it gets its name,
        and may refuse by raising. `owner` keeps what two generations are writing apart, should one have been taken for
        dead. What fails on one rank fails on all, and leaves nothing behind."""
        temporary = self.folder / f".tmp-step_{step}-{owner}"
        self._val_losses.pop(step, None)  # an evaluated step replaces the same one from before
        needed = sum(control.gather(sum(shard.byte_count for shard in shards)))
        try:
            control.on_rank0(lambda: self._begin(temporary, needed, step))
            parts = control.gather_results(lambda: _write_shards(temporary, shards, step, control))
            control.on_rank0(lambda: self._complete(temporary, step, parts, state, publish, companion))
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

    def _complete(
        self,
        temporary: Path,
        step: int,
        parts: list["_Written"],
        state: dict[str, Any],
        publish: Callable[[], None],
        companion: Callable[[Path], None] | None,
    ) -> None:
        """Index, state and manifest, then the name."""
        files = {name: row for part in parts for name, row in part.files.items()}
        if companion is not None:
            companion(temporary)
            files |= {f"{path.parent.name}/{path.name}": _describe(path) for path in sorted(temporary.glob("*/*"))}
            for folder in {path.parent for path in temporary.glob("*/*")}:
                fsync_dir(folder)
        index = merge([part.index for part in parts])
        state = {"format": FORMAT_VERSION, **state}
        for name, value in ((INDEX, index), (STATE, state)):
            data = (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
            write_synced(temporary / name, data)
            files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        inject_fault("save_before_manifest", step)
        write_synced(temporary / MANIFEST, manifest_text(files).encode())
        fsync_dir(temporary)
        inject_fault("save_before_rename", step)
        publish()
        inject_fault("save_published", step)
        _replace(temporary, self.at(step).path, step)
        fsync_dir(self.folder)
        inject_fault("save_after_rename", step)

    def point(self, latest: int) -> None:
        """Let `latest` name this step, and `best` the best checkpoint there is."""
        best = self.best()
        for pointer, checkpoint in (("latest", self.at(latest)), ("best", best)):
            if checkpoint is not None and checkpoint.path.is_dir():
                write_atomic(self.folder / pointer, f"{checkpoint.path.name}\n")
            else:
                (self.folder / pointer).unlink(missing_ok=True)

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` and the best, after the new one is complete."""
        best = self.best()
        for step in self.steps()[:-keep]:
            if best is None or step != best.step:
                self._discard(self.at(step).path)
                self._note_removal(step, keep)

    def set_aside_after(self, step: int) -> None:
        """Going back to an older checkpoint: the newer ones keep their content but are no checkpoints any more."""
        for later in self.steps():
            if later > step:
                path = self.at(later).path
                aside = path.with_name(f"superseded-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                log("SAVE", f"{path.name} set aside as {aside.name}: the run goes on from step {step}")

    def clean(self) -> None:
        """Undo what a killed process left half-done: put back a checkpoint that was being replaced, remove what was
        half-written or half-deleted. Only the owner of the run's lock may do it."""
        if self.folder.is_dir():
            for path in self.folder.glob(".old-step_*"):
                if not (before := path.with_name(path.name.removeprefix(".old-"))).exists():
                    path.rename(before)
            for path in [*self.folder.glob(".tmp-*"), *self.folder.glob(".old-*"), *self.folder.glob(".doomed-*")]:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def _note_removal(self, step: int, keep: int) -> None:
        """For whoever asks for it later."""
        row = {"step": step, "removed_at": time.strftime("%Y-%m-%d %H:%M:%S %z"), "keep_checkpoints": keep}
        with suppress(OSError), (self.folder / REMOVED).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def removal(self, step: int) -> dict[str, Any] | None:
        """When and why a checkpoint was removed by `prune`; None if it was not."""
        try:
            lines = (self.folder / REMOVED).read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return None
        return next((row for row in reversed(rows) if isinstance(row, dict) and row.get("step") == step), None)

    def _discard(self, path: Path) -> None:
        """First out of sight, then away: a half-deleted directory must not look like a checkpoint."""
        doomed = path.with_name(f".doomed-{path.name}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


@dataclass(frozen=True)
class _Written:
    """What one rank wrote."""

    files: dict[str, Any]
    index: dict[str, tuple[str, Index]]


def _write_shards(folder: Path, shards: list[Shard], step: int, control: ControlGroup) -> _Written:
    written = _Written({}, {})
    for shard in shards:
        name = file_name(shard.group, control.rank, control.size)
        written.index[shard.group] = (name, shard.entries)
        if shard.tensors:
            try:
                save_file(shard.tensors, folder / name)
            except SafetensorError as problem:  # its word for a full disk, too
                raise OSError(str(problem)) from None
            written.files[name] = _describe(folder / name)
        inject_fault("save_model_written", step)
    return written


def find_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint by path: its directory, a pointer (`latest`, `best`), or `step_N.pt` for step_N."""
    if path.name in POINTERS:
        found = CheckpointStore(path.parent).pointed(path.name)
        if found is None:
            raise CheckpointError(f"{path} names no checkpoint.")
        return found
    plain = path.with_suffix("") if path.suffix == ".pt" else path
    if path.suffix == ".pt" and path.is_file() and not plain.is_dir():
        raise CheckpointError(
            f"{path} is a pickle file, which can run code when loaded; llmtrain loads none.",
            remedy="Give a checkpoint directory, such as runs/<run_id>/checkpoints/step_20.",
        )
    if step_of(plain.name) is None or not plain.is_dir():
        step = step_of(plain.name)
        removed = CheckpointStore(plain.parent).removal(step) if step is not None else None
        if removed:
            raise CheckpointError(
                f"{path} was removed on {removed.get('removed_at')}: trainer.keep_checkpoints was "
                f"{removed.get('keep_checkpoints')}.",
                remedy="Resume from one that is there (`llmtrain runs show` lists them). To keep every checkpoint of a "
                "run, set trainer.keep_checkpoints to all.",
            )
        raise CheckpointError(
            f"{path} is not a checkpoint.", remedy="Give runs/<run_id>/checkpoints/step_<N>, or a run id."
        )
    return Checkpoint(plain)


def _replace(new: Path, path: Path, step: int) -> None:
    """Put a complete directory in place; what had the name before is removed only afterwards (`clean` puts it back
    when the process is killed in between)."""
    if path.is_symlink():
        path.unlink()
    old = path.with_name(f".old-{path.name}")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        inject_fault("save_while_replacing", step)
    try:
        new.rename(path)
    except OSError:
        if old.exists() and not path.exists():
            old.rename(path)  # what was there is still a checkpoint
        raise
    shutil.rmtree(old, ignore_errors=True)


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:  # safetensors does not sync what it writes
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
