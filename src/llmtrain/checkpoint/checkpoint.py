"""One checkpoint on disk: verified before use, read without pickle.

    checkpoints/step_20/   model.safetensors  optimizer.safetensors  index.json  state.json  manifest.json
                           adapter/  (LoRA runs: the same weights in peft's format)

With several processes each writes its own files (model-00001-of-00002.safetensors); index.json says which tensor is in
which file. manifest.json is written last and holds the SHA-256 of every other file and of its own list of them. Nothing
is pickled, so loading a checkpoint from an untrusted source cannot run code.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.checkpoint.shards import Index, check_index, read_full, read_into
from llmtrain.checkpoint.state import Tensors, TrainState
from llmtrain.config.best_metric import VAL_LOSS
from llmtrain.core.files import open_text
from llmtrain.core.text import format_bytes
from llmtrain.errors import CheckpointError
from llmtrain.runs.checksums import CHECKSUMS, damage, is_entry, read_checksums, step_of

FORMAT_VERSION = 2
STATE = "state.json"
INDEX = "index.json"
GROUPS = ("model", "optimizer")
MAX_JSON_BYTES = 1 << 30
"""Maximum size of state.json and index.json, which is enough for millions of tensors. A sparse file takes no disk
space, but reading it takes all of the memory."""
_REQUIRED_FILES = {INDEX, STATE}
_STATE_FIELDS = {"progress": dict, "config": dict, "data_fingerprint": str, "vocab_size": int}
_OPTIONAL_TEXTS = ("tokenizer_sha256", "base_sha256", "base_model")
"""Fields of state.json that earlier versions, or runs without a base model, do not have."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path

    @property
    def step(self) -> int:
        return step_of(self.path.name) or 0

    @property
    def val_loss(self) -> float | None:
        """Validation loss of these weights; None if they were saved before they were evaluated."""
        progress = self.progress()
        return progress.last_val_loss if progress.evaluated_step == self.step else None

    @property
    def score(self) -> tuple[str, float] | None:
        """trainer.best_metric of the run and its value for these weights; None if it was not evaluated."""
        progress = self.progress()
        if progress.evaluated_step != self.step:
            return None
        trainer = self.state()["config"].get("trainer")
        metric = VAL_LOSS
        if isinstance(trainer, dict):
            metric = str(trainer.get("best_metric", VAL_LOSS))
        value = progress.last_val_loss if metric == VAL_LOSS else progress.last_score
        return None if value is None else (metric, value)

    def verify(self) -> None:
        """Raise CheckpointError, naming the file, unless every byte is as written."""
        for name, entry in self._checksums().items():
            if problem := damage(self.path / name, entry):
                raise CheckpointError(problem)
        # Matching hashes do not prove that the content is consistent.
        index = self._index()
        for group in GROUPS:
            check_index(self.path, index[group])
        if self.progress().step != self.step:
            raise CheckpointError(f"{self.path} contains step {self.progress().step}, expected step {self.step}.")

    def progress(self) -> TrainState:
        try:
            return TrainState.from_dict(self.state()["progress"])
        except ValueError as problem:
            raise CheckpointError(f"{self.path / STATE} has an invalid field in progress: {problem}.") from None

    def state(self) -> dict[str, Any]:
        """The content of state.json."""
        path = self.path / STATE
        state = _read_object(path)
        if state.get("format") != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format {state.get('format')}; this version of llmtrain reads {FORMAT_VERSION}."
            )
        if not all(isinstance(state.get(name), kind) for name, kind in _STATE_FIELDS.items()):
            raise CheckpointError(f"{path} must contain {', '.join(_STATE_FIELDS)}.")
        for name in _OPTIONAL_TEXTS:
            if not isinstance(state.get(name), str | None):
                raise CheckpointError(f"{path} has an invalid field: {name} must be text or null.")
        return state

    def tensors(self, group: str) -> Tensors:
        """All tensors of `model` or `optimizer`, unsharded, on the CPU."""
        return read_full(self.path, self._index()[group])

    def dtypes(self, group: str) -> dict[str, str]:
        """The data type of every tensor of `model` or `optimizer`, such as float32, by its name."""
        return {name: entry["dtype"] for name, entry in self._index()[group].items()}

    def shapes(self, group: str) -> dict[str, list[int]]:
        """The shape of every tensor of `model` or `optimizer`, by its name."""
        return {name: entry["shape"] for name, entry in self._index()[group].items()}

    def read_into(self, group: str, targets: Tensors) -> None:
        """Fill existing tensors in place; of a sharded tensor only this rank's slice is read."""
        read_into(self.path, self._index()[group], targets)

    def _index(self) -> Index:
        path = self.path / INDEX
        index = _read_object(path)
        files: set[str] = set()
        try:
            for group in GROUPS:
                for entry in index[group].values():
                    files.update(piece["file"] for piece in entry["pieces"])
        except (KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{path} must list the tensors of {' and '.join(GROUPS)}.") from None
        unlisted = files - self._checksums().keys()  # includes paths that lead outside the checkpoint
        if unlisted:
            names = ", ".join(sorted(map(str, unlisted)))
            raise CheckpointError(f"{path} refers to files that are not in {CHECKSUMS}: {names[:200]}.")
        return index

    def _checksums(self) -> dict[str, Any]:
        try:
            files = read_checksums(self.path)
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is not a checkpoint: it has no {CHECKSUMS}.") from None
        except ValueError as problem:
            raise CheckpointError(str(problem)) from None
        if not files.keys() >= _REQUIRED_FILES or not all(is_entry(entry) for entry in files.values()):
            raise CheckpointError(f"{self.path / CHECKSUMS} must list {', '.join(sorted(_REQUIRED_FILES))}.")
        return files


def _read_object(path: Path) -> dict[str, Any]:
    try:
        with open_text(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_JSON_BYTES:
                raise CheckpointError(f"{path} is larger than {format_bytes(MAX_JSON_BYTES)}.")
            return dict(json.load(file))
    except (OSError, ValueError, TypeError, RecursionError):
        raise CheckpointError(f"{path} cannot be read.") from None
