"""Using a trained model: text from it, its loss on files, its weights for other programs."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from torch import nn

from llmtrain import registry
from llmtrain.config.data import ChatJsonlSection, DataSection, ExampleDataSection, InstructJsonlSection
from llmtrain.config.model import HfCausalLmSection
from llmtrain.config.schema import EXAMPLE_DATA
from llmtrain.data.examples.json_lines import read_json_lines
from llmtrain.data.examples.prompts import has_chat_template, prompt_prefix, prompt_text
from llmtrain.data.make_batches import make_eval_batches
from llmtrain.data.store.example_store import ExampleStore
from llmtrain.data.store.token_store import TokenStore, smallest_dtype
from llmtrain.data.text.reader import expand_files, read_chunks
from llmtrain.data.text.window_batches import check_length
from llmtrain.distributed.world import World
from llmtrain.errors import DataError, Interrupted, LlmtrainError, UsageError
from llmtrain.inference.load import LoadedModel
from llmtrain.logs import warn
from llmtrain.models.hf.lora import ADAPTER
from llmtrain.training.artifacts import CARD, temporary_beside, write_card, write_origin
from llmtrain.training.build import autocast_for, base_sha256, build_adapter
from llmtrain.training.evaluate import EvalResult, evaluate
from llmtrain.training.sample import sample_text

LEAST_TEMPERATURE = 0.01
Messages = list[dict[str, Any]]


def answers_questions(loaded: LoadedModel) -> bool:
    """Whether a prompt is a question to answer, in the form of the training rows, rather than text to go on with."""
    return loaded.config.data.name in EXAMPLE_DATA and (loaded.is_run or has_chat_template(loaded.tokenizer_dir))


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
    data, folder = loaded.config.data, loaded.tokenizer_dir
    if isinstance(prompt, str):
        text, prefix = prompt, [] if loaded.is_run else loaded.tokenizer.prefix_ids()
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
            loaded.adapter.context_length(),
            temperature,
            top_k,
            seed,
            stop,
            prefix,
        )


def evaluate_files(
    loaded: LoadedModel,
    patterns: list[str],
    batch_size: int,
    block_size: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, EvalResult]:
    """Loss over held-out files: `tuned`, and `base` beside it where the model was made from another."""
    block_size = block_size or loaded.config.model.block_size
    if block_size > loaded.adapter.context_length():
        raise UsageError(f"--block-size {block_size} is beyond the model's {loaded.adapter.context_length()} tokens.")
    store, data = read_store(loaded, expand_files(patterns, "--file"), block_size)
    if isinstance(data, ExampleDataSection) and data.packing and not loaded.adapter.keeps_rows_apart(loaded.module):
        data = data.model_copy(update={"packing": False})
    batches = make_eval_batches(
        store,
        data,
        block_size=block_size,
        micro_batch_size=batch_size,
        vocab_size=loaded.adapter.vocab_size,
        limit=None,
        can_pack=loaded.adapter.can_pack,
    )
    world = World(device=loaded.device)

    def measure(module: nn.Module) -> EvalResult:
        result = evaluate(module, loaded.adapter.loss, batches, world, autocast_for(loaded.config, world), stop=stop)
        if result is None:
            raise Interrupted("Stopped as told, before everything was measured.", remedy="Run the same command again.")
        return result

    found = {"tuned": measure(loaded.module)}
    with base_model(loaded) as base:
        if base is not None:
            found["base"] = measure(base)
    return found


@contextmanager
def base_model(loaded: LoadedModel) -> Iterator[nn.Module | None]:
    """What the model was before it was tuned: the same without its adapters, or read anew; None where there is none."""
    from llmtrain.models.hf.causal_lm import is_adapted, set_adapters

    if is_adapted(loaded.module):
        set_adapters(loaded.module, False)
        yield loaded.module
        set_adapters(loaded.module, True)
    else:
        yield _read_base(loaded) if loaded.base_sha256 else None


def _read_base(loaded: LoadedModel) -> nn.Module | None:
    """The model a full fine-tune began with, where it is still what it was: the run does not need it otherwise."""
    try:
        config = loaded.config.with_values("model", path=loaded.base_path)
        adapter = build_adapter(config, loaded.tokenizer.vocab_size)
        if base_sha256(config, adapter) != loaded.base_sha256:
            raise DataError(f"{loaded.base_path} is not the base model of this run any more.")
        module = adapter.build().to(loaded.device)
        adapter.examine(module)
        return module
    except (LlmtrainError, OSError) as problem:
        warn("EVAL", f"the base model is left out: {getattr(problem, 'what', problem)}")
        return None


def read_store(
    loaded: LoadedModel, files: Sequence[Path], block_size: int
) -> tuple[ExampleStore | TokenStore, DataSection]:
    """The tokens of files: rows of JSON files, text of others. A run that was trained on text reads nothing else."""
    data: DataSection = loaded.config.data
    are_rows = {data.name in EXAMPLE_DATA and path.suffix in (".jsonl", ".json") for path in files}
    if len(are_rows) > 1:
        raise UsageError(
            "--file: rows (.jsonl, .json) and text cannot be measured together.", remedy="Measure them apart."
        )
    if are_rows == {False}:
        return _text_store(loaded, files, block_size), data
    kind = data.name if loaded.is_run else _kind_of_rows(files[0])
    section = InstructJsonlSection if kind == "instruct_jsonl" else ChatJsonlSection
    shared = {name: value for name, value in data if name in section.model_fields and name != "name"}
    data = section(**{**shared, "tokenizer": str(loaded.tokenizer_dir)})
    module = registry.resolve("data.name", kind, registry.DATA)(data, loaded.config.run.seed)
    rows = (row for path in files for row in module.examples_of_file(str(path)))
    return ExampleStore.from_examples(rows, loaded.tokenizer, loaded.config.run.threads or 1), data


def _kind_of_rows(path: Path) -> str:
    """By the first line, for a model that no config of ours says it of."""
    row = next(read_json_lines(path, str(path))).value  # what is wrong with it is told when the rows are read
    return "chat_jsonl" if isinstance(row, dict) and "messages" in row else "instruct_jsonl"


def _text_store(loaded: LoadedModel, files: Sequence[Path], block_size: int) -> TokenStore:
    dtype = smallest_dtype(loaded.tokenizer.vocab_size)
    parts = []
    for path in files:
        for piece in read_chunks(path):
            parts.append(loaded.tokenizer.encode(piece.text).astype(dtype))
            if piece.ends_document and loaded.tokenizer.end_of_text is not None:
                parts.append(np.array([loaded.tokenizer.end_of_text], dtype))
    store = TokenStore(files[0], np.concatenate(parts))
    check_length(store, block_size, "given", may_shrink=False)
    return store


def export_model(loaded: LoadedModel, folder: Path, merge: bool, dtype: str, card_of: Path | None) -> list[str]:
    """Write weights, config, tokenizer and model card; the names of the files. They are written under another name and
    take their own when all are there."""
    try:
        # What `.` or a link stands for is filled: it may be on another disk.
        target = Path(os.path.realpath(folder))
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{folder} exists and is not empty.", remedy="Choose another directory for --to.")
        target.parent.mkdir(parents=True, exist_ok=True)
        _fill_folder(target, lambda fresh: _write_model(loaded, fresh, merge, dtype, card_of))
        return sorted(path.name for path in target.iterdir())
    except (OSError, SafetensorError) as problem:  # the second is what safetensors says of a full disk
        raise UsageError(f"Cannot write to {folder}: {getattr(problem, 'strerror', None) or problem}.") from None


def _fill_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """A directory that is not there yet gets its name when it is complete. One that is there stays: it may be a mount,
    or somebody's current directory."""
    is_new = not target.exists()
    fresh = temporary_beside(target, "new") if is_new else temporary_beside(target / "model", "new")
    fresh.mkdir()
    try:
        fill(fresh)
        if is_new:
            fresh.rename(target)
        else:
            for path in sorted(fresh.iterdir()):
                path.rename(target / path.name)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _write_model(loaded: LoadedModel, folder: Path, merge: bool, dtype: str, card_of: Path | None) -> None:
    companion = None if merge else loaded.adapter.companion(loaded.module)
    if companion:
        companion(folder)
        for path in (folder / ADAPTER).iterdir():
            path.rename(folder / path.name)
        (folder / ADAPTER).rmdir()
    else:
        loaded.adapter.export(loaded.module, folder, loaded.tokenizer.end_of_text, dtype)
    loaded.tokenizer.save(folder)
    if companion and loaded.base_sha256:
        write_origin(folder, loaded.base_sha256)
    if loaded.is_run:
        config = loaded.config
        if isinstance(config.model, HfCausalLmSection):
            config = config.with_values("model", path=loaded.base_path)
        write_card(folder, config, loaded.progress, loaded.base_sha256, is_adapter=companion is not None)
    elif card_of is not None and (card_of / CARD).is_file():
        shutil.copyfile(card_of / CARD, folder / CARD)
