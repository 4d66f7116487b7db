"""The log-probabilities of the model at step 0, which `dpo` and `ipo` compare with.

They are computed once, before the first step, with the model as the run has it: the same kernels, data type and
packing, adapters of an earlier run included. So no second model is in memory, and a step has no second forward pass.

    <cache_dir>/references/<key>.safetensors    train and val (pairs, 2) float32, NaN for pairs that are not used

A mixture has the pairs of all its sources there, one source after the other; its weights are not part of the key.

The key is a hash of what determines the numbers. A checkpoint records it: the weights of step 0 are gone then, and a
store that is missing is computed again from what the run started from.
"""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmtrain.checkpoint.state import model_tensors, state_sha256
from llmtrain.core.files import is_there, write_bytes_atomic
from llmtrain.core.logs import log, warn
from llmtrain.core.progress import detail, phase
from llmtrain.core.text import plural
from llmtrain.data.batches import EvalBatches
from llmtrain.data.mixture.mixed_batches import MixedBatches, MixedEvalBatches
from llmtrain.data.mixture.sample_sets import PairSet
from llmtrain.data.preferences.pair_batches import PairBatches, PairEvalBatches, References
from llmtrain.distributed.world import World
from llmtrain.errors import Interrupted, TrainingFailed
from llmtrain.models.base import evaluating
from llmtrain.models.group_losses import Groups
from llmtrain.training.components import Components
from llmtrain.training.model_handle import ModelHandle

FORMAT_VERSION = 1
SPLITS = ("train", "val")
PROGRESS_SEC = 10.0
_LOCATION = ("path", "revision", "tokenizer_path", "local_files_only", "trust_remote_code")
"""Fields of a model that say where it is, and not what it is: the base model is known by its hash."""


@dataclass(frozen=True)
class ReferenceStore:
    """The file with the reference log-probabilities of one key."""

    path: Path

    @classmethod
    def of_key(cls, cache_dir: Path, key: str) -> "ReferenceStore":
        return cls(cache_dir / "references" / f"{key}.safetensors")

    @property
    def key(self) -> str:
        return self.path.stem

    def read(self, counts: dict[str, int]) -> dict[str, References] | None:
        """The values of each split; None, with a warning, if the file is damaged. `counts`: pairs of each split."""
        if not is_there(self.path):
            return None
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="numpy") as file:
                metadata = file.metadata() or {}
                found = {split: file.get_tensor(split) for split in SPLITS}
        except (OSError, SafetensorError, ValueError) as problem:
            warn("DATA", f"{self.path} cannot be read ({problem}); its log-probabilities are computed again")
            return None
        shapes = {split: (count, 2) for split, count in counts.items()}
        is_right = all(found[split].shape == shapes[split] and found[split].dtype == np.float32 for split in SPLITS)
        if not is_right or metadata.get("key") != self.key or metadata.get("sha256") != _sha256(found):
            warn("DATA", f"{self.path} is damaged; its log-probabilities are computed again")
            return None
        return found

    def write(self, values: dict[str, References]) -> None:
        """A failure is a warning: the run goes on, and a resumed run computes them again."""
        from safetensors.numpy import save

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes_atomic(self.path, save(dict(values), {"key": self.key, "sha256": _sha256(values)}))
        except OSError as problem:
            warn(
                "DATA",
                f"the reference log-probabilities could not be stored in {self.path.parent} "
                f"({problem.strerror or problem}); a resumed run computes them again",
            )


def _sha256(values: dict[str, References]) -> str:
    digest = hashlib.sha256()
    for split in SPLITS:
        digest.update(np.ascontiguousarray(values[split], dtype="<f4").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class ReferenceModel:
    """The model at step 0, as checkpoints record it."""

    key: str
    """Hash of all that determines its log-probabilities."""
    weights_sha256: str

    def as_dict(self) -> dict[str, str]:
        return {"key": self.key, "weights_sha256": self.weights_sha256}


def identify_reference(components: Components, model: ModelHandle, world: World, threads: int | None) -> ReferenceModel:
    """The model as it is now. Every rank must call this: the weights of a sharded model are gathered."""
    weights = ""
    if model.parallel.is_sharded or world.is_first:
        weights = state_sha256(model_tensors(model.module))
    recorded = components.recorded
    config = recorded["config"]
    data = config["data"]
    data = data["sources"][0] if "sources" in data else data  # all sources of a mixture have the same packing
    section = {name: value for name, value in config["model"].items() if name not in _LOCATION}
    trainer = {name: config["trainer"][name] for name in ("micro_batch_size", "eval_batches", "compile")}
    identity: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "weights": weights,
        "model": section,
        "trainer": trainer,
        "packing": data["packing"],
        "attention": getattr(components.adapter, "attention", None),
        "threads": threads,
    }
    names = ("base_sha256", "data_fingerprint", "tokenizer_sha256", "numerics", "precision", "device", "architecture")
    identity |= {name: recorded[name] for name in names}
    identity["torch"] = torch.__version__
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:20]
    return world.control.on_rank0(lambda: ReferenceModel(key, weights))


def with_references(components: Components, references: dict[str, References]) -> Components:
    """The components with batches that have the log-probabilities of the model at step 0."""
    train: Any = components.train_batches
    val: EvalBatches = components.eval_batches
    if isinstance(train, MixedBatches):
        sets = []
        for source, values in zip(train.sources, _by_source(components, references, "train"), strict=True):
            assert isinstance(source.samples, PairSet)
            sets.append(source.samples.with_references(values))
        train = train.with_samples(sets)
    else:
        assert isinstance(train, PairBatches)
        train = train.with_references(references["train"])
    if isinstance(val, MixedEvalBatches):
        parts = zip(_batches(components)["val"], _by_source(components, references, "val"), strict=True)
        val = val.with_parts([part.with_references(values) for part, values in parts])
    else:
        assert isinstance(val, PairEvalBatches)
        val = val.with_references(references["val"])
    return replace(components, train_batches=train, eval_batches=val)


def _by_source(components: Components, references: dict[str, References], split: str) -> list[References]:
    """The values of each source of a mixture: those of all sources are stored one after the other."""
    counts = [batches.samples.store.pair_count for batches in _batches(components)[split]]
    return np.split(references[split], np.cumsum(counts)[:-1])


def read_references(store: ReferenceStore, components: Components, world: World) -> dict[str, References] | None:
    """The values of a store that is complete, on every rank."""
    counts = {}
    for split, sources in _batches(components).items():
        counts[split] = sum(batches.samples.store.pair_count for batches in sources)
    found = world.control.on_rank0(lambda: store.read(counts))
    if found is not None:
        log("DATA", f"reference log-probabilities of {plural(sum(counts.values()), 'pair')} from {store.path}")
    return found


def compute_references(
    components: Components, model: ModelHandle, world: World, stop: Callable[[], bool]
) -> dict[str, References]:
    """The values of both splits, by the model as it is now, on every rank."""
    phase("computing reference log-probabilities")
    started = time.monotonic()
    found = {}
    for split, sources in _batches(components).items():
        found[split] = np.concatenate([_of_source(split, batches, model, world, stop) for batches in sources])
    pairs = sum(int(np.isfinite(values[:, 0]).sum()) for values in found.values())
    log("DATA", f"reference log-probabilities of {plural(pairs, 'pair')} in {time.monotonic() - started:.1f} s")
    return found


def _batches(components: Components) -> dict[str, list[PairEvalBatches]]:
    """The pairs of each split in a fixed order, whatever the order in which they are trained on: one item, or one per
    source of a mixture."""
    train: Any = components.train_batches
    val: EvalBatches = components.eval_batches
    samples = [source.samples for source in train.sources] if isinstance(train, MixedBatches) else [train]
    parts = val.parts if isinstance(val, MixedEvalBatches) else [val]
    found: dict[str, list[PairEvalBatches]] = {"train": [], "val": []}
    for each in samples:
        assert isinstance(each, PairSet | PairBatches)
        found["train"].append(PairEvalBatches(each.samples, train.size))
    for part in parts:
        assert isinstance(part, PairEvalBatches)
        found["val"].append(part)
    return found


@torch.no_grad()
def _of_source(
    split: str, batches: PairEvalBatches, model: ModelHandle, world: World, stop: Callable[[], bool]
) -> References:
    """Batches are distributed over the ranks in rounds, as in `evaluate`."""
    values = np.full((batches.samples.store.pair_count, 2), np.nan, dtype=np.float32)
    count = len(batches)
    logged = time.monotonic()
    with evaluating(model.parallel.module):
        for first in range(0, count, world.world_size):
            if stop():
                raise Interrupted("Interrupted before step 1, while reference log-probabilities were computed.")
            number = first + world.rank
            batch = batches[number if number < count else first].to(world.device)
            assert batch.pairs is not None
            sums = model.group_losses(batch, Groups(batch.pairs.answers, 2 * batch.pairs.total))
            by_rank = world.control.gather((-sums).float().cpu().numpy())
            for rank, found in enumerate(by_rank[: count - first]):
                values[batches.samples.pairs_of(batches.samples_of(first + rank))] = found.reshape(-1, 2)
            text = (
                f"reference log-probabilities, {split}: {min(count, first + world.world_size):,} of {count:,} batches"
            )
            if not detail(text) and time.monotonic() - logged > PROGRESS_SEC:
                logged = time.monotonic()
                log("DATA", text)
    _check_finite(values, batches)
    return values


def _check_finite(values: References, batches: PairEvalBatches) -> None:
    used = np.concatenate([batches.samples.pairs_of(batches.samples_of(index)) for index in range(len(batches))])
    bad = used[~np.isfinite(values[used]).all(axis=1)]
    if len(bad):
        file, number = batches.samples.store.location(int(bad[0]))
        raise TrainingFailed(
            f"The log-probabilities of the pair in {file.name}, {file.unit} {number}, are not finite before step 1.",
            remedy="Check the weights of the model; with trainer.precision bf16 try fp32.",
            reason="not_finite",
        )
