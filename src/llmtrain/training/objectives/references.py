"""The log-probabilities of the model at step 0, which `dpo` and `ipo` compare with.

They are computed once, before the first step, with the model as the run has it: the same kernels, data type and
packing, adapters of an earlier run included. So no second model is in memory, and a step has no second forward pass.

    <cache_dir>/references/
      <key>.safetensors            train and val (pairs, 2) float32, NaN for pairs that are not used
      <key>.partial.safetensors    the same while they are computed, NaN also for pairs that are missing

A mixture has the pairs of all its sources there, one source after the other; its weights are not part of the key.

The key is a hash of what determines the numbers. A checkpoint records it: the weights of step 0 are gone then, and a
store that is missing is computed again from what the run started from.
"""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmtrain.checkpoint.state import model_tensors, state_sha256
from llmtrain.core.fault_injection import inject_fault
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
from llmtrain.runs.progress_lines import duration_text
from llmtrain.runs.sources import first_source
from llmtrain.training.components import Components
from llmtrain.training.model_handle import ModelHandle

FORMAT_VERSION = 1
SPLITS = ("train", "val")
PROGRESS_SEC = 10.0
SAVE_SEC = 30.0
"""How often what has been computed is stored, which a killed run then need not compute again."""
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

    @property
    def partial(self) -> "ReferenceStore":
        """The file with what has been computed so far."""
        return ReferenceStore(self.path.with_name(f"{self.key}.partial.safetensors"))

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

    def write(self, values: dict[str, References]) -> bool:
        """Whether it was written. A failure is a warning: the run goes on, and a resumed run computes them again."""
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
            return False
        return True

    def finish(self, values: dict[str, References]) -> None:
        """Write all values, which replace those of the partial file."""
        self.write(values)
        with suppress(OSError):
            self.partial.path.unlink(missing_ok=True)


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
    section = {name: value for name, value in config["model"].items() if name not in _LOCATION}
    trainer = {name: config["trainer"][name] for name in ("micro_batch_size", "eval_batches", "compile")}
    identity: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "weights": weights,
        "model": section,
        "trainer": trainer,
        "packing": first_source(config["data"])["packing"],  # all sources of a mixture have the same
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
    batches = _batches(components)
    by_source = {split: _by_source(batches[split], references[split]) for split in SPLITS}
    if isinstance(train, MixedBatches):
        sets = []
        for source, values in zip(train.sources, by_source["train"], strict=True):
            assert isinstance(source.samples, PairSet)
            sets.append(source.samples.with_references(values))
        train = train.with_samples(sets)
    else:
        assert isinstance(train, PairBatches)
        train = train.with_references(references["train"])
    if isinstance(val, MixedEvalBatches):
        parts = zip(batches["val"], by_source["val"], strict=True)
        val = val.with_parts([part.with_references(values) for part, values in parts])
    else:
        assert isinstance(val, PairEvalBatches)
        val = val.with_references(references["val"])
    return replace(components, train_batches=train, eval_batches=val)


def _by_source(sources: list[PairEvalBatches], values: References) -> list[References]:
    """The values of each source of a split: those of all sources are stored one after the other."""
    counts = [batches.samples.store.pair_count for batches in sources]
    return np.split(values, np.cumsum(counts)[:-1])


def read_references(store: ReferenceStore, components: Components, world: World) -> dict[str, References] | None:
    """The values of a store that has those of all pairs that are used, on every rank. Others are missing after
    --allow-config-change, for example with more eval_batches."""
    batches = _batches(components)
    counts = _counts(batches)
    found = world.control.on_rank0(lambda: store.read(counts))
    if found is not None and not _is_complete(batches, found):
        return None
    if found is not None:
        log("DATA", f"reference log-probabilities of {plural(sum(counts.values()), 'pair')} from {store.path}")
    return found


def compute_references(
    components: Components,
    model: ModelHandle,
    world: World,
    stop: Callable[[], bool],
    store: ReferenceStore | None = None,
) -> dict[str, References]:
    """The values of both splits, by the model as it is now, on every rank. What an interrupted or killed run has left
    in the partial file of `store` is not computed again."""
    phase("computing reference log-probabilities")
    started = time.monotonic()
    batches = _batches(components)
    counts = _counts(batches)
    found = None
    if store is not None:
        partial = store.partial
        found = world.control.on_rank0(lambda: partial.read(counts))
    if found is None:
        found = {split: np.full((count, 2), np.nan, dtype=np.float32) for split, count in counts.items()}
    before = _known(found)
    if store is not None and before:
        log("DATA", f"reference log-probabilities of {plural(before, 'pair')} from {store.partial.path}")
    parts = _Parts(found, store if world.is_first else None)
    by_source = []  # (split, batches, values) of each source
    for split, sources in batches.items():
        for each, values in zip(sources, _by_source(sources, found[split]), strict=True):
            by_source.append((split, each, values))
    try:
        for split, each, values in by_source:
            _compute_source(split, each, values, model, world, stop, parts)
    except Interrupted:
        parts.save()
        raise
    for _, each, values in by_source:
        _check_finite(values, each)
    seconds = time.monotonic() - started
    log("DATA", f"reference log-probabilities of {plural(_known(found) - before, 'pair')} in {seconds:.1f} s")
    return found


def _is_complete(batches: dict[str, list[PairEvalBatches]], values: dict[str, References]) -> bool:
    for split, sources in batches.items():
        for each, found in zip(sources, _by_source(sources, values[split]), strict=True):
            if not np.isfinite(found[_used(each)]).all():
                return False
    return True


def _used(batches: PairEvalBatches) -> list[int]:
    """The pairs of all batches, as indexes in the store."""
    return [pair for index in range(len(batches)) for pair in batches.samples.pairs_of(batches.samples_of(index))]


def _known(values: dict[str, References]) -> int:
    return sum(int(np.isfinite(each).all(axis=1).sum()) for each in values.values())


class _Parts:
    """The values while they are computed. With a store they are saved from time to time."""

    def __init__(self, values: dict[str, References], store: ReferenceStore | None) -> None:
        self.values = values
        self._store = store
        self._saved_at = time.monotonic()

    def save_if_due(self) -> None:
        if time.monotonic() - self._saved_at > SAVE_SEC:
            self.save()

    def save(self) -> None:
        if self._store is not None and _known(self.values) and not self._store.partial.write(self.values):
            self._store = None  # it has warned, and the next attempt would fail as well
        self._saved_at = time.monotonic()


def _counts(batches: dict[str, list[PairEvalBatches]]) -> dict[str, int]:
    """Pairs of each split, of all sources."""
    return {split: sum(each.samples.store.pair_count for each in sources) for split, sources in batches.items()}


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
def _compute_source(
    split: str,
    batches: PairEvalBatches,
    values: References,
    model: ModelHandle,
    world: World,
    stop: Callable[[], bool],
    parts: _Parts,
) -> None:
    """Fill in what is missing of `values`, a part of the values of the split. Batches are distributed over the ranks in
    rounds, as in `evaluate`. The values of a batch do not depend on the round, so those that an earlier start has
    stored are left out."""
    pairs = [batches.samples.pairs_of(batches.samples_of(index)) for index in range(len(batches))]
    missing = [index for index, each in enumerate(pairs) if not np.isfinite(values[each]).all()]
    done = len(pairs) - len(missing)
    began = logged = time.monotonic()
    with evaluating(model.parallel.module):
        for first in range(0, len(missing), world.world_size):
            if stop():
                raise Interrupted("Interrupted before step 1, while reference log-probabilities were computed.")
            round_ = missing[first : first + world.world_size]
            batch = batches[round_[world.rank] if world.rank < len(round_) else round_[0]].to(world.device)
            assert batch.pairs is not None
            sums = model.group_losses(batch, Groups(batch.pairs.answers, 2 * batch.pairs.total))
            by_rank = world.control.gather((-sums).float().cpu().numpy())
            for index, found in zip(round_, by_rank, strict=False):  # ranks without a batch of their own are left out
                values[pairs[index]] = found.reshape(-1, 2)
            done += len(round_)
            parts.save_if_due()
            inject_fault("reference", done)
            computed = first + len(round_)
            left = (time.monotonic() - began) / computed * (len(missing) - computed)
            progress = f"{done:,} of {len(pairs):,} batches | {duration_text(left)} left"
            text = f"reference log-probabilities, {split}: {progress}"
            if not detail(text) and time.monotonic() - logged > PROGRESS_SEC:
                logged = time.monotonic()
                log("DATA", text)


def _check_finite(values: References, batches: PairEvalBatches) -> None:
    used = np.array(_used(batches))
    bad = used[~np.isfinite(values[used]).all(axis=1)]
    if len(bad):
        file, number = batches.samples.store.location(int(bad[0]))
        raise TrainingFailed(
            f"The log-probabilities of the pair in {file.name}, {file.unit} {number}, are not finite before step 1.",
            remedy="Check the weights of the model; with trainer.precision bf16 try fp32.",
            reason="not_finite",
        )
