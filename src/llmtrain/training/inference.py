"""Using a trained run: its model and tokenizer loaded, sampled, measured, exported."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from llmtrain.config.document import Document
from llmtrain.config.load import build_config
from llmtrain.config.schema import Config
from llmtrain.data.batches import EvalBatches, check_length
from llmtrain.data.text_reader import expand_files, read_pieces
from llmtrain.data.token_store import TokenStore, smallest_dtype
from llmtrain.data.tokenizer import Tokenizer, load_saved_tokenizer
from llmtrain.distributed.world import World, pick_device
from llmtrain.errors import CheckpointError, UsageError
from llmtrain.models.base import ModelAdapter
from llmtrain.runs.directory import RunDirectory, find_run
from llmtrain.training.assemble import autocast_for, build_adapter
from llmtrain.training.checkpoint import Checkpoint, CheckpointStore, find_checkpoint
from llmtrain.training.evaluate import EvalResult, evaluate
from llmtrain.training.sample import sample_text

LEAST_TEMPERATURE = 0.01


@dataclass(frozen=True)
class LoadedRun:
    run_id: str
    step: int
    config: Config
    adapter: ModelAdapter
    module: nn.Module
    tokenizer: Tokenizer
    device: torch.device


def load_run(root: str, reference: str, checkpoint: str, device: str) -> LoadedRun:
    """The model of a run at one of its checkpoints, ready for use."""
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device '{device}' is unknown.", known=("auto", "cpu", "cuda"))
    run = find_run(root, reference)
    chosen = _choose(run, checkpoint)
    chosen.verify()
    state = chosen.state()
    config = build_config(Document(str(chosen.path), state["config"]))
    tokenizer = load_saved_tokenizer(run.tokenizer)
    # The weights come from the checkpoint, so whatever the run was initialised from need not be there any more.
    adapter = build_adapter(config.with_values("model", init="random"), tokenizer.vocab_size)
    module = adapter.build()
    try:
        module.load_state_dict(chosen.tensors("model"))
    except RuntimeError as problem:
        raise CheckpointError(f"{chosen.path} holds another model: {' '.join(str(problem).split())[:300]}") from None
    where = pick_device(device)
    return LoadedRun(run.run_id, chosen.step, config, adapter, module.to(where).eval(), tokenizer, where)


def _choose(run: RunDirectory, name: str) -> Checkpoint:
    store = CheckpointStore(run.checkpoints)
    if name in ("best", "latest"):
        found = store.pointed(name) or store.pointed("latest") or store.newest_usable()
        if found:
            return found
        raise CheckpointError(f"Run '{run.run_id}' has no checkpoint yet.")
    try:
        return find_checkpoint(run.checkpoints / name)
    except CheckpointError:
        known = [f"step_{step}" for step in store.steps()]
        raise CheckpointError(
            f"Run '{run.run_id}' has no checkpoint '{name}'.", known=["best", "latest", *known]
        ) from None


def generate_text(
    loaded: LoadedRun, prompt: str, max_new_tokens: int, temperature: float, top_k: int, seed: int
) -> str:
    if temperature != 0 and not LEAST_TEMPERATURE <= temperature < float("inf"):
        raise UsageError(
            f"A temperature of {temperature} cannot be used.", remedy=f"Give 0, or {LEAST_TEMPERATURE} and more."
        )
    block_size = loaded.config.model.block_size
    return sample_text(loaded.module, loaded.tokenizer, prompt, max_new_tokens, block_size, temperature, top_k, seed)


def evaluate_files(loaded: LoadedRun, patterns: list[str], batch_size: int) -> EvalResult:
    """Loss over the text of files, in whole windows of the model's context, a document after the other."""
    files = expand_files(patterns, "--file")
    dtype = smallest_dtype(loaded.tokenizer.vocab_size)
    parts = []
    for path in files:
        for piece in read_pieces(path):
            parts.append(loaded.tokenizer.encode(piece.text).astype(dtype))
            if piece.ends_document and loaded.tokenizer.end_of_text is not None:
                parts.append(np.array([loaded.tokenizer.end_of_text], dtype))
    store = TokenStore(files[0], np.concatenate(parts))
    check_length(store, loaded.config.model.block_size, "given", may_shrink=False)
    batches = EvalBatches(store, loaded.config.model.block_size, batch_size, loaded.adapter.vocab_size)
    world = World(device=loaded.device)
    result = evaluate(loaded.module, loaded.adapter.loss, batches, world, autocast_for(loaded.config, world))
    assert result is not None  # nothing told it to stop
    return result


def export_run(loaded: LoadedRun, folder: Path) -> list[str]:
    """Write weights, config and tokenizer; the names of the files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty.", remedy="Choose another directory for --to.")
    try:
        loaded.adapter.export(loaded.module, folder, loaded.tokenizer.end_of_text)
        loaded.tokenizer.save(folder)
    except OSError as problem:
        raise UsageError(f"Cannot write to {folder}: {problem.strerror or problem}.") from None
    return sorted(path.name for path in folder.iterdir())
