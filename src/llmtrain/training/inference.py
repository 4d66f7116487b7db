"""Using a trained model: text from it, its loss on files, its weights for other programs."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from llmtrain import registry
from llmtrain.config.schema import DataSection
from llmtrain.data.make_batches import make_eval_batches
from llmtrain.data.prompts import has_chat_template, prompt_prefix, prompt_text
from llmtrain.data.row_store import RowStore
from llmtrain.data.text_reader import expand_files, read_pieces
from llmtrain.data.token_store import TokenStore, smallest_dtype
from llmtrain.data.window_batches import check_length
from llmtrain.distributed.world import World
from llmtrain.errors import DataError, LlmtrainError, ResumeMe, UsageError
from llmtrain.logs import warn
from llmtrain.runs.content_hash import files_sha256
from llmtrain.training.assemble import autocast_for
from llmtrain.training.evaluate import EvalResult, evaluate
from llmtrain.training.loading import LoadedModel
from llmtrain.training.outputs import ADAPTER, write_card
from llmtrain.training.sample import sample_text

LEAST_TEMPERATURE = 0.01
ROW_KINDS = ("instruct_jsonl", "chat_jsonl")
Messages = list[dict[str, Any]]


def answers_questions(loaded: LoadedModel) -> bool:
    """Whether a prompt is a question to answer, in the form of the training rows, rather than text to go on with."""
    return loaded.config.data.name in ROW_KINDS and (
        loaded.step is not None or has_chat_template(loaded.tokenizer_folder)
    )


def generate_text(
    loaded: LoadedModel,
    prompt: str | Messages,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    stop: Callable[[], bool] = lambda: False,
) -> str:
    """What follows a text, or the answer to a conversation."""
    if temperature != 0 and not LEAST_TEMPERATURE <= temperature < float("inf"):
        raise UsageError(
            f"A temperature of {temperature} cannot be used.", remedy=f"Give 0, or {LEAST_TEMPERATURE} and more."
        )
    data, folder = loaded.config.data, loaded.tokenizer_folder
    if isinstance(prompt, str):
        text, prefix = prompt, [] if loaded.step is not None else loaded.tokenizer.prefix_ids()
    else:
        text, prefix = prompt_text(data, folder, prompt), prompt_prefix(data, folder, loaded.tokenizer)
    world = World(device=loaded.device)
    with autocast_for(loaded.config, world)():
        return sample_text(
            loaded.adapter,
            loaded.module,
            loaded.tokenizer,
            text,
            max_new_tokens,
            loaded.config.model.block_size,
            temperature,
            top_k,
            seed,
            stop,
            prefix,
        )


def evaluate_files(
    loaded: LoadedModel, patterns: list[str], batch_size: int, stop: Callable[[], bool] = lambda: False
) -> dict[str, EvalResult]:
    """Loss over held-out files: `tuned`, and `base` beside it where the model was made from another."""
    store, data = read_store(loaded, expand_files(patterns, "--file"))
    if data.packing and not loaded.adapter.keeps_rows_apart(loaded.module):
        data = data.model_copy(update={"packing": False})
    batches = make_eval_batches(
        store,
        data,
        block_size=loaded.config.model.block_size,
        micro_batch_size=batch_size,
        vocab_size=loaded.adapter.vocab_size,
        limit=None,
        can_pack=loaded.adapter.can_pack,
    )
    world = World(device=loaded.device)

    def measure(module: nn.Module) -> EvalResult:
        result = evaluate(module, loaded.adapter.loss, batches, world, autocast_for(loaded.config, world), stop=stop)
        if result is None:
            raise ResumeMe("Stopped as told, before everything was measured.", remedy="Run the same command again.")
        return result

    found = {"tuned": measure(loaded.module)}
    with base_model(loaded) as base:
        if base is not None:
            found["base"] = measure(base)
    return found


@contextmanager
def base_model(loaded: LoadedModel) -> Iterator[nn.Module | None]:
    """What the model was before it was tuned: the same without its adapters, or read anew; None where there is none."""
    from llmtrain.models.hf_causal_lm import is_adapted, set_adapters

    if is_adapted(loaded.module):
        set_adapters(loaded.module, False)
        yield loaded.module
        set_adapters(loaded.module, True)
    else:
        yield _read_base(loaded) if loaded.base_sha256 else None


def _read_base(loaded: LoadedModel) -> nn.Module | None:
    """The model a full fine-tune began with, where it is still what it was: the run does not need it otherwise."""
    try:
        if files_sha256(loaded.adapter.base_files(), Path(loaded.config.data.cache_dir).expanduser()) != (
            loaded.base_sha256
        ):
            raise DataError(f"{loaded.config.model.path} is not the base model of this run any more.")
        return loaded.adapter.build().to(loaded.device)
    except (LlmtrainError, OSError) as problem:
        warn("EVAL", f"the base model is left out: {getattr(problem, 'what', problem)}")
        return None


def read_store(loaded: LoadedModel, files: Sequence[Path]) -> tuple[RowStore | TokenStore, DataSection]:
    """The tokens of files: of rows where they are JSON lines, else of text in whole windows."""
    data = loaded.config.data
    if files[0].suffix != ".jsonl" or (loaded.step is not None and data.name not in ROW_KINDS):
        return _text_store(loaded, files), data
    kind = data.name if loaded.step is not None else _kind_of_rows(files[0])
    data = data.model_copy(update={"name": kind, "tokenizer": str(loaded.tokenizer_folder)})
    module = registry.resolve("data.name", kind, registry.DATA)(data, loaded.config.run.seed)
    rows = (row for path in files for row in module.rows_of_file(str(path)))
    return RowStore.from_rows(rows, loaded.tokenizer, loaded.config.run.threads or 1), data


def _kind_of_rows(path: Path) -> str:
    """By the first line, for a model that no config of ours says it of."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first = next((line for line in file if line.strip()), "")
    try:
        row = json.loads(first)
    except ValueError as problem:
        raise DataError(f"{path}, line 1: not JSON: {problem}.") from None
    return "chat_jsonl" if isinstance(row, dict) and "messages" in row else "instruct_jsonl"


def _text_store(loaded: LoadedModel, files: Sequence[Path]) -> TokenStore:
    dtype = smallest_dtype(loaded.tokenizer.vocab_size)
    parts = []
    for path in files:
        for piece in read_pieces(path):
            parts.append(loaded.tokenizer.encode(piece.text).astype(dtype))
            if piece.ends_document and loaded.tokenizer.end_of_text is not None:
                parts.append(np.array([loaded.tokenizer.end_of_text], dtype))
    store = TokenStore(files[0], np.concatenate(parts))
    check_length(store, loaded.config.model.block_size, "given", may_shrink=False)
    return store


def export_model(loaded: LoadedModel, folder: Path, merge: bool) -> list[str]:
    """Write weights, config, tokenizer and model card; the names of the files. What a failure leaves is removed."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty.", remedy="Choose another directory for --to.")
    was_there = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        companion = None if merge else loaded.adapter.companion(loaded.module)
        if companion:
            companion(folder)
            for path in (folder / ADAPTER).iterdir():
                path.rename(folder / path.name)
            (folder / ADAPTER).rmdir()
        else:
            loaded.adapter.export(loaded.module, folder, loaded.tokenizer.end_of_text)
        loaded.tokenizer.save(folder)
        write_card(folder, loaded.config, loaded.progress, loaded.base_sha256, is_adapter=companion is not None)
    except BaseException as problem:
        _empty(folder, and_remove=not was_there)
        if isinstance(problem, OSError):
            raise UsageError(f"Cannot write to {folder}: {problem.strerror or problem}.") from None
        raise
    return sorted(path.name for path in folder.iterdir())


def _empty(folder: Path, and_remove: bool) -> None:
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if and_remove:
        folder.rmdir()
