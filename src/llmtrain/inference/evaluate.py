"""Loss of a trained model on files, and of the base model it was fine-tuned from."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
from torch import nn

from llmtrain import registry
from llmtrain.config.data import (
    ChatJsonlSection,
    DataSection,
    ExampleBatchesSection,
    InstructJsonlSection,
    PreferenceJsonlSection,
)
from llmtrain.config.mixture import data_sections
from llmtrain.config.model import HfCausalLmSection
from llmtrain.config.objective import NextTokenSection
from llmtrain.config.schema import EXAMPLE_DATA
from llmtrain.core.logs import warn
from llmtrain.core.text import plural
from llmtrain.data.batches import EvalBatches
from llmtrain.data.make_batches import least_width, make_eval_batches
from llmtrain.data.records.open_file import RECORD_SUFFIXES, open_records
from llmtrain.data.records.usable import UsableRecords
from llmtrain.data.store.example_store import ExampleStore
from llmtrain.data.store.token_store import TokenStore, smallest_dtype
from llmtrain.data.text.documents import DocumentReader
from llmtrain.data.text.reader import expand_files
from llmtrain.data.tokenizers.byte import ByteTokenizer
from llmtrain.distributed.parallel import ParallelModel
from llmtrain.errors import DataError, Interrupted, LlmtrainError, UsageError
from llmtrain.inference.load import LoadedModel
from llmtrain.models.base import build_checked
from llmtrain.models.hf.lora import has_adapter
from llmtrain.training.components import base_sha256, build_adapter
from llmtrain.training.evaluate import EvalResult, evaluate
from llmtrain.training.memory_errors import check_batch_memory
from llmtrain.training.model_handle import ModelHandle
from llmtrain.training.objectives.next_token import NextToken
from llmtrain.training.random_state import preserved
from llmtrain.training.torch_settings import default_settings


@default_settings()
def evaluate_files(
    loaded: LoadedModel,
    patterns: list[str],
    batch_size: int,
    block_size: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[str, int, int | None], None] = lambda what, done, total: None,  # noqa: ARG005
) -> dict[str, EvalResult]:
    """Loss on files: `tuned`, and `base` if the model was fine-tuned from another one. `progress` is called with what
    is being done, the number of batches done, and their total if it is known."""
    block_size = block_size or loaded.config.model.block_size
    context_length = loaded.adapter.context_length()
    if block_size > context_length:
        raise UsageError(
            f"--block-size must be at most {context_length}, the context length of the model, got {block_size}."
        )
    progress("Tokenizing", 0, None)
    store, data = read_store(loaded, expand_files(patterns, "--file"))
    if isinstance(store, TokenStore):
        block_size = min(block_size, len(store) - 1)  # a short text is one window
    batches = _checked_batches(loaded, store, data, block_size, batch_size)

    def measure(module: nn.Module, name: str) -> EvalResult:
        done = count()

        def stop_between_batches() -> bool:
            progress(f"Evaluating {name}", next(done), len(batches))
            return stop()

        module = loaded.in_compute_dtype(module)
        model = ModelHandle(
            loaded.adapter,
            module,
            ParallelModel(module),
            loaded.adapter.loss,
            loaded.autocast,
            NextToken(NextTokenSection()),
            loaded.adapter.group_losses,
        )
        result = evaluate(model, batches, loaded.world, stop=stop_between_batches)
        if result is None:
            raise Interrupted("Interrupted before the evaluation was complete.", remedy="Run the same command again.")
        if not math.isfinite(result.loss):
            raise DataError(
                f"The loss of {name} is {result.loss}: its weights are damaged, or its training diverged.",
                remedy="Use an earlier checkpoint.",
                reason="not_finite",
            )
        return result

    results = {"tuned": measure(loaded.module, loaded.label)}
    with base_model(loaded) as base:
        if base is not None:
            results["base"] = measure(base, "the base model")
    return results


def _checked_batches(
    loaded: LoadedModel, store: ExampleStore | TokenStore, data: DataSection, block_size: int, batch_size: int
) -> EvalBatches:
    """The batches of a store; raises UsageError if one does not fit in memory."""
    if isinstance(data, ExampleBatchesSection) and data.packing:
        is_packed = loaded.adapter.separates_packed_examples(loaded.module)
        data = data.model_copy(update={"packing": is_packed})
    check_batch_memory(batch_size, least_width(block_size), processes=1, option="--batch-size")
    batches = make_eval_batches(
        store,
        data,
        block_size=block_size,
        micro_batch_size=batch_size,
        vocab_size=loaded.adapter.vocab_size,
        limit=None,
        can_pack=loaded.adapter.can_pack,
        end_of_text=loaded.tokenizer.end_of_text,
    )
    check_batch_memory(*batches.largest_shape(), processes=1, option="--batch-size")
    return batches


@contextmanager
def base_model(loaded: LoadedModel) -> Iterator[nn.Module | None]:
    """The model before fine-tuning: with its adapters disabled, or read again; None if it was not fine-tuned."""
    from llmtrain.models.hf.causal_lm import enable_adapters

    if has_adapter(loaded.module):
        enable_adapters(loaded.module, False)
        try:
            yield loaded.module
        finally:
            enable_adapters(loaded.module, True)
    else:
        yield _read_base(loaded) if loaded.base_sha256 else None


def _read_base(loaded: LoadedModel) -> nn.Module | None:
    """The base model of a full fine-tune; None, with a warning, if it is gone or has changed."""
    try:
        config = loaded.config
        if isinstance(config.model, HfCausalLmSection):
            config = config.with_values("model", path=loaded.base_path, revision=loaded.base_revision)
        adapter = build_adapter(config.model, loaded.tokenizer.vocab_size)
        if base_sha256(adapter, config.data.cache_dir) != loaded.base_sha256:
            raise DataError(f"{loaded.base_path} has changed since this run was trained.")
        with preserved():
            module = build_checked(adapter).to(loaded.device)
        adapter.probe(module)
        return module
    except (LlmtrainError, OSError) as problem:
        warn("EVAL", f"the base model is not evaluated: {getattr(problem, 'what', problem)}")
        return None


def read_store(loaded: LoadedModel, files: Sequence[Path]) -> tuple[ExampleStore | TokenStore, DataSection]:
    """Tokens of the files: examples from files of records, text from others. A run trained on text reads them as its
    own files: with data.text_column their documents, else all as plain text."""
    data: DataSection = data_sections(loaded.config.data)[0]  # of a mixture, files are read as the first source is
    has_examples = {data.name in EXAMPLE_DATA and path.suffix.lower() in RECORD_SUFFIXES for path in files}
    if len(has_examples) > 1:
        raise UsageError(
            f"--file: examples ({', '.join(RECORD_SUFFIXES)}) and text cannot be evaluated together.",
            remedy="Evaluate them in two commands.",
        )
    if has_examples == {False}:
        return _text_store(loaded, files), data
    has_own_kind = loaded.is_run and not isinstance(data, PreferenceJsonlSection)
    kind = data.name if has_own_kind else _example_kind(files[0])
    section = InstructJsonlSection if kind == "instruct_jsonl" else ChatJsonlSection
    shared = {name: value for name, value in data if name in section.model_fields and name != "name"}
    data = section(**{**shared, "tokenizer": str(loaded.tokenizer_dir)})
    module = registry.resolve("data.name", kind, registry.DATA)(data, loaded.config.run.seed)
    examples = (example for path in files for example in module.examples_of_file(str(path)))
    return ExampleStore.from_examples(examples, loaded.tokenizer, loaded.config.run.threads or 1), data


def _example_kind(path: Path) -> str:
    """The data.name for a file with one answer per example, by its first one. The two formats refuse preference
    pairs."""
    example = next(open_records(path).read(), None)  # errors in it are reported when the examples are read
    is_chat = example is not None and isinstance(example.value, dict) and "messages" in example.value
    return "chat_jsonl" if is_chat else "instruct_jsonl"


def _text_store(loaded: LoadedModel, files: Sequence[Path]) -> TokenStore:
    dtype = smallest_dtype(loaded.tokenizer.vocab_size)
    data = data_sections(loaded.config.data)[0]
    records = UsableRecords(getattr(data, "on_bad_record", "error"), "data.on_bad_record", "record")
    reader = DocumentReader(getattr(data, "text_column", None), records, isinstance(loaded.tokenizer, ByteTokenizer))
    parts = []
    for path in files:
        for chunk in reader.read(path):
            parts.append(loaded.tokenizer.encode(chunk.text).astype(dtype))
            if chunk.ends_document and loaded.tokenizer.end_of_text is not None:
                parts.append(np.array([loaded.tokenizer.end_of_text], dtype))
    store = TokenStore(files[0], np.concatenate(parts))
    if len(store) < 2:
        raise DataError(
            f"The given text has {plural(len(store), 'token')}: there is no next token to predict.",
            remedy="Add more text.",
        )
    return store
