"""Loss of a trained model on files, and of the base model it was fine-tuned from."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
from torch import nn

from llmtrain import registry
from llmtrain.config.data import ChatJsonlSection, DataSection, ExampleBatchesSection, InstructJsonlSection
from llmtrain.config.model import HfCausalLmSection
from llmtrain.config.schema import EXAMPLE_DATA
from llmtrain.data.examples.json_lines import read_json_lines
from llmtrain.data.make_batches import make_eval_batches
from llmtrain.data.store.example_store import ExampleStore
from llmtrain.data.store.token_store import TokenStore, smallest_dtype
from llmtrain.data.text.reader import expand_files, read_chunks
from llmtrain.data.text.window_batches import check_length
from llmtrain.distributed.parallel import ParallelModel
from llmtrain.distributed.world import World
from llmtrain.errors import DataError, Interrupted, LlmtrainError, UsageError
from llmtrain.inference.load import LoadedModel
from llmtrain.logs import warn
from llmtrain.models.base import build_checked
from llmtrain.models.hf.lora import has_adapter
from llmtrain.training.build import base_sha256, build_adapter
from llmtrain.training.evaluate import EvalResult, evaluate
from llmtrain.training.model import ModelHandle
from llmtrain.training.random_state import preserved


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
    store, data = read_store(loaded, expand_files(patterns, "--file"), block_size)
    if (
        isinstance(data, ExampleBatchesSection)
        and data.packing
        and not loaded.adapter.separates_packed_examples(loaded.module)
    ):
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

    def measure(module: nn.Module, what: str) -> EvalResult:
        adapter, done = loaded.adapter, count()

        def stop_between_batches() -> bool:
            progress(what, next(done), len(batches))
            return stop()

        module = loaded.in_compute_dtype(module)
        model = ModelHandle(adapter, module, ParallelModel(module), adapter.loss, loaded.autocast)
        result = evaluate(model, batches, World(device=loaded.device), stop=stop_between_batches)
        if result is None:
            raise Interrupted("Interrupted before the evaluation was complete.", remedy="Run the same command again.")
        return result

    results = {"tuned": measure(loaded.module, f"Evaluating {loaded.label}")}
    with base_model(loaded) as base:
        if base is not None:
            results["base"] = measure(base, "Evaluating the base model")
    return results


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
        adapter = build_adapter(config, loaded.tokenizer.vocab_size)
        if base_sha256(config, adapter) != loaded.base_sha256:
            raise DataError(f"{loaded.base_path} has changed since this run was trained.")
        with preserved():
            module = build_checked(adapter).to(loaded.device)
        adapter.probe(module)
        return module
    except (LlmtrainError, OSError) as problem:
        warn("EVAL", f"the base model is not evaluated: {getattr(problem, 'what', problem)}")
        return None


def read_store(
    loaded: LoadedModel, files: Sequence[Path], block_size: int
) -> tuple[ExampleStore | TokenStore, DataSection]:
    """Tokens of the files: examples from JSON files, text from others. A run trained on text reads all as text."""
    data: DataSection = loaded.config.data
    has_examples = {data.name in EXAMPLE_DATA and path.suffix in (".jsonl", ".json") for path in files}
    if len(has_examples) > 1:
        raise UsageError(
            "--file: examples (.jsonl, .json) and text cannot be evaluated together.",
            remedy="Evaluate them in two commands.",
        )
    if has_examples == {False}:
        return _text_store(loaded, files, block_size), data
    kind = data.name if loaded.is_run else _example_kind(files[0])
    section = InstructJsonlSection if kind == "instruct_jsonl" else ChatJsonlSection
    shared = {name: value for name, value in data if name in section.model_fields and name != "name"}
    data = section(**{**shared, "tokenizer": str(loaded.tokenizer_dir)})
    module = registry.resolve("data.name", kind, registry.DATA)(data, loaded.config.run.seed)
    examples = (example for path in files for example in module.examples_of_file(str(path)))
    return ExampleStore.from_examples(examples, loaded.tokenizer, loaded.config.run.threads or 1), data


def _example_kind(path: Path) -> str:
    """The data.name for a file, by its first line."""
    example = next(read_json_lines(path, str(path))).value  # errors in it are reported when the examples are read
    return "chat_jsonl" if isinstance(example, dict) and "messages" in example else "instruct_jsonl"


def _text_store(loaded: LoadedModel, files: Sequence[Path], block_size: int) -> TokenStore:
    dtype = smallest_dtype(loaded.tokenizer.vocab_size)
    parts = []
    for path in files:
        for chunk in read_chunks(path):
            parts.append(loaded.tokenizer.encode(chunk.text).astype(dtype))
            if chunk.ends_document and loaded.tokenizer.end_of_text is not None:
                parts.append(np.array([loaded.tokenizer.end_of_text], dtype))
    store = TokenStore(files[0], np.concatenate(parts))
    check_length(store, block_size, "given", may_shrink=False)
    return store
