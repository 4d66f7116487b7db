"""Model: a trained model in memory, to generate with, evaluate and export."""

import copy
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llmtrain.core.arguments import (
    Sampling,
    Source,
    as_integer,
    as_text,
    check_callable,
    check_event,
    check_one_of,
    optional_text,
)
from llmtrain.distributed.world import World
from llmtrain.errors import UsageError
from llmtrain.hub.model_names import parse_hub_model
from llmtrain.inference.evaluate import evaluate_files
from llmtrain.inference.export import FORMATS, ExportOptions, Format, export_model, parse_dtype, with_base_model
from llmtrain.inference.generate import generate_text, prompt_for
from llmtrain.inference.load import LoadedModel, load_model
from llmtrain.inference.tasks import TaskEvaluation, TaskOptions, evaluate_tasks, find_baseline, read_tasks
from llmtrain.training.shutdown import StopEvent

PathLike = str | os.PathLike[str]
Dtype = Literal["float32", "bfloat16", "float16", "f32", "bf16", "f16", "q8_0"]
OnText = Callable[[str], None]
OnProgress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Loss:
    """Mean cross-entropy per token, and its exponential."""

    loss: float
    perplexity: float


@dataclass(frozen=True)
class Evaluation:
    """The loss of a model on files. The fields are those of `llmtrain eval --json`."""

    run: str
    """Run id, or the directory of the model."""
    step: int | None
    files: list[str]
    loss: float
    perplexity: float
    tokens: int
    base: Loss | None
    """Loss of the model that this one was fine-tuned from; None without one."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ExportResult:
    """What was exported, and to where."""

    run: str
    step: int | None
    val_loss: float | None
    to: str
    files: list[str]
    base_model: str | None
    """NAME or NAME@REVISION on the Hugging Face hub; None if it is not known, and without a base model."""
    format: Format
    check: dict[str, Any] | None
    """What was compared with the model after loading the export in a new process; None if it was not checked."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Model:
    """A model in memory. Several threads may generate with one model."""

    def __init__(self, source: Source, device: str = "auto", world: World | None = None) -> None:
        self._source = source
        self._loaded = load_model(source, device, world)

    def __repr__(self) -> str:
        return f"<llmtrain.Model {self._loaded.label}, step {self._loaded.step}, on {self._loaded.device}>"

    @property
    def loaded(self) -> LoadedModel:
        return self._loaded

    @property
    def source(self) -> Source:
        return self._source

    def generate(
        self,
        prompt: str = "",
        *,
        raw: bool = False,
        max_new_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 50,
        top_p: float | None = None,
        seed: int = 0,
        on_text: OnText | None = None,
        stop: StopEvent | None = None,
    ) -> str:
        """The continuation of a prompt, without the prompt; of a model trained on examples, the answer to a question.

        raw: continue the prompt as plain text, without the prompt format of the model.
        temperature: 0 always takes the most likely token.
        top_k: sample from this many most likely tokens.
        top_p: sample from the most likely tokens that have this total probability.
        on_text: called with the text so far whenever there is more of it.
        stop: setting this event, from another thread, ends the text early.
        """
        if not isinstance(prompt, str):
            raise UsageError(f"prompt must be text, got {prompt!r}.")
        check_callable("on_text", on_text)
        sampling = Sampling(max_new_tokens, temperature, top_k, seed, top_p)
        return generate_text(self._loaded, prompt_for(self._loaded, prompt, raw), sampling, _is_set(stop), on_text)

    def evaluate(
        self,
        files: PathLike | Sequence[PathLike],
        *,
        batch_size: int = 8,
        block_size: int | None = None,
        on_progress: OnProgress = lambda what, done, total: None,  # noqa: ARG005
        stop: StopEvent | None = None,
    ) -> Evaluation:
        """Loss and perplexity on text or .jsonl files (names or globs).

        batch_size: sequences per batch.
        block_size: tokens per sequence; by default that of the run. A shorter text is one sequence.
        on_progress: called with what is being done, the number of batches done, and their total if it is known.
        stop: setting this event, from another thread, raises Interrupted.
        """
        batch_size = as_integer("batch_size", batch_size)
        if block_size is not None:
            block_size = as_integer("block_size", block_size)
        check_callable("on_progress", on_progress)
        if isinstance(files, str | os.PathLike) or not isinstance(files, Iterable):
            files = [files]
        names = [as_text("files", each) for each in files]
        results = evaluate_files(self._loaded, names, batch_size, block_size, _is_set(stop), on_progress)
        tuned = results["tuned"]
        base = results.get("base")
        return Evaluation(
            run=self._loaded.label,
            step=self._loaded.step,
            files=names,
            loss=tuned.loss,
            perplexity=tuned.perplexity,
            tokens=tuned.tokens,
            base=Loss(base.loss, base.perplexity) if base else None,
        )

    def evaluate_tasks(
        self,
        tasks: str | PathLike | Sequence[str | PathLike],
        *,
        limit: int | None = None,
        tasks_dir: PathLike | None = None,
        baseline: PathLike | None = None,
        batch_size: int = 8,
        chat_template: bool | None = None,
        on_progress: OnProgress = lambda what, done, total: None,  # noqa: ARG005
        stop: StopEvent | None = None,
    ) -> TaskEvaluation:
        """Scores on tasks: names of lm_eval's, such as `hellaswag` or `arc_easy:5` (with five examples before each
        question), of those that llmtrain brings, or files of items (my.jsonl).

        limit: only the first items of each task.
        tasks_dir: directory of `llmtrain fetch-tasks`; by default ~/.cache/llmtrain/tasks.
        baseline: `base` (what the model was fine-tuned from), a run or a model, to compare with on the same items.
        batch_size: sequences per forward pass.
        chat_template: whether to write items with the chat template; by default for models that answer.
        on_progress: called with what is being done, the number of sequences done, and their total.
        stop: setting this event, from another thread, raises Interrupted.
        """
        check_callable("on_progress", on_progress)
        if limit is not None:
            limit = as_integer("limit", limit)
        given = [tasks] if isinstance(tasks, str | os.PathLike) or not isinstance(tasks, Iterable) else list(tasks)
        options = TaskOptions(as_integer("batch_size", batch_size), chat_template, _is_set(stop), on_progress)
        name = optional_text("baseline", baseline)
        found = find_baseline(name, self._source) if name is not None else None
        read = read_tasks([as_text("tasks", each) for each in given], optional_text("tasks_dir", tasks_dir), limit)
        return evaluate_tasks(self._loaded, read, options, found, self._source)

    def export(
        self,
        to: PathLike,
        *,
        merge: bool = False,
        dtype: Dtype | None = None,
        base_model: str | None = None,
        format: Format = "hf",
        check: bool = True,
    ) -> ExportResult:
        """Write a directory that transformers loads, or peft for a LoRA run without `merge`; or a GGUF file.

        to: directory to create; an existing one must be empty.
        merge: LoRA runs: merge the adapter into the base model.
        dtype: data type of the weights; by default that of the base model, float32 for weights that a run has trained.
            q8_0 (8 bits) only for GGUF.
        base_model: name on the Hugging Face hub of the model that was fine-tuned, as NAME or NAME@REVISION, for the
            model card; by default what was recorded when it was downloaded.
        format: hf, or gguf for llama.cpp and Ollama.
        check: load the export in a new process and compare it with the model. If it differs, raises DataError and
            writes nothing.
        """
        loaded = replace(self._loaded, module=copy.deepcopy(self._loaded.module))
        return export_once(loaded, self._source, to, base_model, ExportOptions(merge, dtype, format, check))


def export_once(
    loaded: LoadedModel, source: Source, to: PathLike, base_model: str | None, options: ExportOptions
) -> ExportResult:
    """Model.export without a copy in memory: the module is changed and cannot be used afterwards."""
    to = as_text("to", to)
    check_one_of("format", options.format, FORMATS)
    options = replace(options, dtype=parse_dtype("dtype", options.dtype, options.format))
    if base_model is not None:
        loaded = with_base_model(loaded, parse_hub_model(as_text("base_model", base_model), "base_model"))
    written = export_model(loaded, Path(to).expanduser(), options, source)
    return ExportResult(
        run=loaded.label,
        step=loaded.step,
        val_loss=loaded.val_loss,
        to=to,
        files=written.files,
        base_model=str(loaded.base_model) if loaded.base_model else None,
        format=options.format,
        check=written.check.as_dict() if written.check else None,
    )


def _is_set(stop: StopEvent | None) -> Callable[[], bool]:
    check_event("stop", stop)
    return stop.is_set if stop is not None else lambda: False
