"""`train --from RUN[@STEP]`: a new run that starts from the weights of another one, at step 0 with a fresh optimizer.

meta.json records the origin before anything else is written, so a run that is killed before its first checkpoint starts
from the same weights again; after that checkpoint the origin is not needed any more.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.checkpoint.state import model_tensors
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.compat.upgrade import upgraded_values
from llmtrain.config.schema import differences, may_change
from llmtrain.core.files import file_sha256
from llmtrain.core.logs import log
from llmtrain.errors import CheckpointError, UsageError
from llmtrain.runs.checksums import CHECKSUMS, POINTERS
from llmtrain.runs.directory import RunDirectory, find_run
from llmtrain.runs.recorded_config import STEP, split_reference
from llmtrain.runs.view import RunView
from llmtrain.training.resume import Resumption

# Fields of a model that do not decide what its weights mean.
_NOT_ARCHITECTURE = ("attention", "dropout", "dtype", "trust_remote_code", "vocab_size")
_LORA_SCALING = ("alpha", "dora", "rank", "rslora", "target_modules")


@dataclass(frozen=True)
class Origin:
    """The checkpoint whose weights a new run starts from."""

    run_id: str
    checkpoint: Checkpoint
    manifest_sha256: str

    def as_dict(self) -> dict[str, Any]:
        """The origin as a JSON object, for meta.json."""
        return {
            "run_id": self.run_id,
            "step": self.checkpoint.step,
            "checkpoint": str(self.checkpoint.path.absolute()),
            "manifest_sha256": self.manifest_sha256,
        }


def find_origin(root: str, reference: str) -> Origin:
    """The checkpoint that RUN[@STEP] names."""
    name, at = split_reference(reference)
    run = find_run(root, name)
    store = CheckpointStore(run.checkpoints)
    steps = store.steps()
    numbered = STEP.fullmatch(at)
    if numbered:
        step = int(numbered[1])
        which = f"of step {numbered[1]}"
        checkpoint = store.at(step) if step in steps else None
    else:
        which = "yet"
        checkpoint = store.pointed(at) or store.newest_usable()
    if checkpoint is None:
        known = [*POINTERS, *map(str, steps)] if steps else None
        raise CheckpointError(f"Run '{run.run_id}' has no checkpoint {which}.", known=known)
    checkpoint.verify()
    return Origin(run.run_id, checkpoint, file_sha256(checkpoint.path / CHECKSUMS))


def resolve_origin(root: str, reference: str | None, resumption: Resumption | None) -> Origin | None:
    """The origin of a new run, or of one that is resumed before its first checkpoint; None for any other run."""
    if resumption is not None:
        if resumption.checkpoint is not None:
            return None
        recorded = origin_of(resumption.run)
        if recorded is not None:
            return recorded
    return find_origin(root, reference) if reference else None


def origin_of(run: RunDirectory) -> Origin | None:
    """The checkpoint, unchanged, whose weights a run started from; None for a run without."""
    recorded = RunView(run).meta.get("origin")
    if recorded is None:
        return None
    remedy = "Restore it, or start a new run from another checkpoint with --from."
    what = f"Run '{run.run_id}' starts from the weights of"
    path = recorded.get("checkpoint") if isinstance(recorded, dict) else None
    if not isinstance(path, str):
        raise CheckpointError(f"{what} another run, but {run.meta} does not name it.", remedy=remedy)
    checkpoint = Checkpoint(Path(path))
    try:
        checkpoint.verify()
    except CheckpointError as problem:
        raise CheckpointError(f"{what} {path}, which cannot be used: {problem.what}", remedy=remedy) from None
    sha256 = file_sha256(checkpoint.path / CHECKSUMS)
    if sha256 != recorded.get("manifest_sha256"):
        raise CheckpointError(f"{what} {path}, which has changed since.", remedy=remedy)
    return Origin(str(recorded.get("run_id")), checkpoint, sha256)


def check_architecture(origin: Origin, recorded: dict[str, Any]) -> None:
    """Refuse weights of another architecture, tokenizer or base model. `recorded`: see resume_fingerprint."""
    then = origin.checkpoint.state()
    before = {"model": _architecture(upgraded_values(then["config"]).get("model"))}
    model = recorded["config"]["model"]
    after = {"model": _architecture(model)}
    changes = [change for change in differences(before, after) if not may_change(change[0])]
    names = ["vocab_size", "tokenizer_sha256"]
    if model.get("lora"):
        names.append("base_sha256")
    for name in names:
        if then.get(name) not in (None, recorded.get(name)):
            changes.append((name, then[name], recorded[name]))
    if changes:
        raise UsageError(
            f"The weights of {origin.checkpoint.path} do not fit this config:\n  - "
            + "\n  - ".join(f"{path}: {old!r} -> {new!r}" for path, old, new in changes),
            remedy="Use the model and tokenizer of that run: without --config, `train --from` starts from its config.",
        )


def _architecture(model: Any) -> dict[str, Any]:
    """The fields of a model section that decide what its weights mean."""
    fields = dict(model) if isinstance(model, dict) else {}
    ignored = list(_NOT_ARCHITECTURE)
    has_positions = "path" not in fields and fields.get("architecture") != "modern"  # among its weights
    if not has_positions:
        ignored.append("block_size")
    if isinstance(fields.get("lora"), dict):
        fields["lora"] = {name: fields["lora"].get(name) for name in _LORA_SCALING}
    return {name: value for name, value in fields.items() if name not in ignored}


def load_weights(origin: Origin, module: nn.Module) -> None:
    """Every rank calls this and reads what it needs."""
    try:
        origin.checkpoint.read_into("model", model_tensors(module))
    except (RuntimeError, KeyError, ValueError, TypeError) as problem:
        raise UsageError(
            f"{origin.checkpoint.path} contains another model: {' '.join(str(problem).split())[:300]}",
            remedy="Use the model of that run.",
        ) from None
    log("TRAIN", f"starting from the weights of run {origin.run_id} at step {origin.checkpoint.step}")
