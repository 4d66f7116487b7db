"""Directories for people, beside the checkpoints of a run: the best adapter, and one directory per epoch.

adapter/           LoRA runs: a copy of the best adapter, with its model card
best/              output.layout epochs: the files of the best checkpoint
epoch-N/rank-K/    output.layout epochs: what rank K wrote at the end of epoch N; shared files are in rank-0/
artifacts.json     which of these the run has created: other directories of these names belong to the user
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import nn

from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.checkpoint.model_card import model_card
from llmtrain.checkpoint.replace import replace_directory
from llmtrain.checkpoint.state import TrainState
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.model import HfCausalLmSection, ModelSection
from llmtrain.config.schema import Config
from llmtrain.core.files import is_there, read_json, write_json
from llmtrain.core.logs import warn
from llmtrain.models.base import ModelAdapter, WriteInto
from llmtrain.models.hf.lora import ADAPTER, BASE_RECORD
from llmtrain.runs.checksums import CHECKSUMS
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.task_scores import task_scores_at

CARD = "README.md"
TEMPORARY = ".llmtrain-"
_EPOCH = re.compile(r"epoch-([1-9][0-9]{0,17})")
_RANK_FILE = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")


@dataclass(frozen=True)
class Artifacts:
    config: Config
    run: RunDirectory
    adapter: ModelAdapter
    base_sha256: str | None
    _warned: set[Path] = field(default_factory=set)

    def extra_files(self, module: nn.Module, progress: TrainState) -> WriteInto | None:
        """A function that writes the adapter and its model card into a checkpoint; None if there is no adapter.
        Every rank must call this: sharded weights are gathered."""
        write_weights = self.adapter.checkpoint_extras(module)
        if write_weights is None:
            return None
        values = asdict(progress)  # a background save writes later, when the progress has changed
        values["tasks"] = task_scores_at(self.run, progress.step)
        base_model = self.adapter.base_model()
        base_path = _local_base(self.config.model)

        def write(folder: Path) -> None:
            write_weights(folder)
            card = model_card(self.config, values, base_model, self.base_sha256, is_adapter=True)
            (folder / ADAPTER / CARD).write_text(card, encoding="utf-8")
            write_origin(folder / ADAPTER, self.base_sha256, base_path)

        return write

    def publish(self, step: int, epoch: int | None) -> None:
        """Update the directories after the checkpoint of a step, with which this epoch ended, is complete."""
        store = CheckpointStore(self.run.checkpoints)
        checkpoint = store.at(step)
        if store.pointed("best") == checkpoint:
            self.publish_best(checkpoint)
        if self.config.output.layout == "epochs" and epoch is not None:
            self._create(self.run.epoch(epoch), lambda folder: _link_by_rank(checkpoint, folder))

    def publish_best(self, checkpoint: Checkpoint) -> None:
        """Update adapter/ (a copy, because people edit it) and best/."""
        if (checkpoint.path / ADAPTER).is_dir():
            self._create(self.run.adapter, lambda folder: _copy(checkpoint.path / ADAPTER, folder))
        if self.config.output.layout == "epochs":
            self._create(self.run.best, lambda folder: _link(checkpoint.path, folder))

    def repair(self, epochs: int, epoch_ended_at: Callable[[int], int | None]) -> None:
        """On resume: create what a killed process did not publish, and remove epochs after the resumed checkpoint."""
        store = CheckpointStore(self.run.checkpoints)
        for prefix in ("new", "old"):
            for leftover in self.run.path.glob(f"{TEMPORARY}{prefix}-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        for path in self.run.path.glob("epoch-*"):
            number = _EPOCH.fullmatch(path.name)
            if number and int(number[1]) > epochs:
                self._remove(path)
        for step in store.steps():
            epoch = epoch_ended_at(step)
            if epoch is not None and not self.run.epoch(epoch).exists():
                self.publish(step, epoch)
        best = store.pointed("best")
        if best:
            self.publish_best(best)
        else:
            for path in (self.run.adapter, self.run.best):
                self._remove(path)

    def _create(self, target: Path, fill: WriteInto) -> None:
        """Create or replace a directory, unless the user has one of this name."""
        recorded = self._recorded()
        if is_there(target) and not self._is_created_by_run(target):
            if target not in self._warned:
                self._warned.add(target)
                warn("SAVE", f"{target} was not created by this run and is not replaced. Move it to have it created.")
            return
        if target.name not in recorded:
            write_json(self.run.artifacts, sorted({*recorded, target.name}))  # first: unrecorded it would be the user's
        write_directory(target, fill)

    def _remove(self, target: Path) -> None:
        if self._is_created_by_run(target):
            shutil.rmtree(target, ignore_errors=True)
            write_json(self.run.artifacts, sorted(self._recorded() - {target.name}))

    def _is_created_by_run(self, target: Path) -> bool:
        """Whether the directory is recorded and has the file that every directory of its kind has."""
        return target.name in self._recorded() and self._has_marker(target)

    def _has_marker(self, target: Path) -> bool:
        markers = {self.run.adapter: BASE_RECORD, self.run.best: CHECKSUMS}
        marker = markers.get(target, f"rank-0/{CHECKSUMS}")
        return not target.is_symlink() and (target / marker).is_file()

    def _recorded(self) -> set[str]:
        if self.run.artifacts.exists():
            names = read_json(self.run.artifacts)
            if not isinstance(names, list):  # damaged: whatever is there belongs to the user
                return set()
            return {name for name in names if isinstance(name, str)}
        # The first version of llmtrain kept no record.
        candidates = (self.run.adapter, self.run.best, *self.run.path.glob("epoch-*"))
        return {path.name for path in candidates if self._has_marker(path)}


def write_origin(folder: Path, base_sha256: str | None, base_path: Path | None = None) -> None:
    """Record the base model of an adapter. `base_path`: its directory, for commands on this machine; not for others."""
    record = {"base_sha256": base_sha256}
    if base_path:
        record["base_path"] = str(base_path)
    (folder / BASE_RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")


def _local_base(model: ModelSection) -> Path | None:
    """The directory of the base model; None if it is a name on the hub."""
    if not isinstance(model, HfCausalLmSection):
        return None
    directory = Path(model.path).expanduser()
    return directory.absolute() if directory.is_dir() else None


def write_directory(target: Path, fill: WriteInto) -> None:
    """Fill a directory under a temporary name, then let it replace `target`."""
    new = temporary_path(target, "new")
    new.mkdir()
    try:
        fill(new)
        replace_directory(new, target, temporary_path(target, "old"))
    finally:
        shutil.rmtree(new, ignore_errors=True)


def temporary_path(target: Path, prefix: str) -> Path:
    """A unique name beside the target that `repair` recognizes."""
    return target.with_name(f"{TEMPORARY}{prefix}-{secrets.token_hex(4)}-{target.name}")


def _copy(source: Path, folder: Path) -> None:
    for path in source.iterdir():
        shutil.copyfile(path, folder / path.name)


def _link(source: Path, folder: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            _link_file(path, folder / path.relative_to(source))


def _link_by_rank(checkpoint: Checkpoint, folder: Path) -> None:
    for path in checkpoint.path.rglob("*"):
        if path.is_file():
            match = _RANK_FILE.search(path.name)
            rank = int(match[1]) - 1 if match else 0
            _link_file(path, folder / f"rank-{rank}" / path.relative_to(checkpoint.path))


def _link_file(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target)
    except OSError:  # some network storage has no hard links
        shutil.copyfile(path, target)
