"""llmtrain eval: loss and perplexity of models on files, and their scores on tasks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.commands.options import (
    DEFAULT_ROOT,
    AdapterOption,
    CheckpointOption,
    DeviceOption,
    JsonOption,
    ModelOption,
    RootOption,
    complete_run,
    show,
)
from llmtrain.commands.spinner import progress
from llmtrain.commands.task_tables import scores_text
from llmtrain.core.arguments import MINIMUM, Source
from llmtrain.core.terminal import format_table
from llmtrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmtrain.inference.evaluate_sources import Evaluated
    from llmtrain.inference.loaded_model import Evaluation


FileOption = Annotated[
    list[str] | None,
    typer.Option("--file", "-f", help="Loss on a file of text or examples, or glob. Repeatable.", show_default=False),
]
TasksOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tasks",
        help="Scores on tasks, separated by commas: of lm_eval (hellaswag,arc_easy:5), of llmtrain (arithmetic, "
        "grammar, spelling), or files of items (my.jsonl).",
        show_default=False,
    ),
]
LimitOption = Annotated[
    int | None, typer.Option(min=MINIMUM["limit"], help="Only the first items of each task.", show_default=False)
]
TasksDirOption = Annotated[
    str | None,
    typer.Option("--tasks-dir", help="Directory of fetch-tasks. Default: ~/.cache/llmtrain/tasks.", show_default=False),
]
BaselineOption = Annotated[
    str | None,
    typer.Option(
        help="Compare with a run, a model, or `base`, from which the run was fine-tuned, on the same items.",
        show_default=False,
    ),
]
ChatTemplateOption = Annotated[
    bool | None,
    typer.Option(
        "--chat-template/--no-chat-template",
        help="Write items with the chat template. Default: for models that answer.",
        show_default=False,
    ),
]
BlockSizeOption = Annotated[
    int | None,
    typer.Option(
        min=MINIMUM["block_size"],
        help="Tokens per sequence. Default: that of the run. A shorter text is one sequence.",
    ),
]


def command(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="As --run.", show_default=False, autocompletion=complete_run),
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(
            "--run",
            help="Run id or path of a run directory. Repeatable: one row per run.",
            show_default=False,
            autocompletion=complete_run,
        ),
    ] = None,
    adapter: AdapterOption = None,
    model: ModelOption = None,
    checkpoint: CheckpointOption = "best",
    file: FileOption = None,
    tasks: TasksOption = None,
    limit: LimitOption = None,
    tasks_dir: TasksDirOption = None,
    baseline: BaselineOption = None,
    chat_template: ChatTemplateOption = None,
    batch_size: Annotated[int, typer.Option(min=MINIMUM["batch_size"], help="Sequences per batch.")] = 8,
    block_size: BlockSizeOption = None,
    device: DeviceOption = "auto",
    processes: Annotated[int | None, typer.Option(min=1, help="Number of processes on this machine.")] = None,
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Evaluate runs, an adapter or a model directory: the loss on files, scores on tasks, or both."""
    from llmtrain.training.shutdown import StopFlag

    options: dict[str, Any] = {
        "limit": limit,
        "tasks_dir": tasks_dir,
        "baseline": baseline,
        "chat_template": chat_template,
    }
    _check_options(file, tasks, options)
    named = [*(runs or ()), *(run or ())]
    if processes:
        of_models = {"run": named, "adapter": adapter, "model": model, "checkpoint": checkpoint, "root": root}
        sizes = {"batch-size": batch_size, "block-size": block_size, "device": device, "json": json_ or None}
        _evaluate_in_processes(processes, {**of_models, "file": file, "tasks": tasks, **options, **sizes})
        return
    # None: an adapter or a model directory
    sources = [Source(name, adapter, model, checkpoint, root) for name in named or [None]]
    with StopFlag() as stop, progress("Loading the model") as show_progress:
        stop.interrupted = "Interrupted before the evaluation began."
        from llmtrain.inference.evaluate_sources import EvalRequest, evaluate_sources, evaluation_world

        request = EvalRequest(sources, file or (), tasks or (), batch_size=batch_size, block_size=block_size, **options)
        with evaluation_world(device, stop) as world:
            evaluated = evaluate_sources(request, world, stop, show_progress)
    if world.is_first:
        _show(json_, evaluated)


def _evaluate_in_processes(processes: int, options: Mapping[str, Any]) -> None:
    """Start the processes, each with these options, and wait for their end."""
    from llmtrain.config.distributed import DistributedSection
    from llmtrain.distributed.workers import local_node, run_processes, worker_command

    words = []
    for name, value in options.items():
        option = name.replace("_", "-")
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, bool):
                words.append(f"--{option}" if each else f"--no-{option}")
            elif each is not None:
                words.append(f"--{option}={each}")
    run_processes(local_node(processes), worker_command("eval", *words), DistributedSection())


def _show(as_json: bool, evaluated: "Evaluated") -> None:
    losses = evaluated.losses
    scores = evaluated.scores
    texts = []
    if losses:
        texts.append(_text(losses[0]) if len(losses) == 1 else _table(losses))
    if scores:
        texts.append(scores_text(scores))
    values: list[dict[str, Any]] = [{} for _ in (losses or scores)]
    for results in ([each.as_dict() for each in losses], [each.as_dict() for each in scores]):
        for value, result in zip(values, results, strict=False):  # of the same model; one list may be empty
            value |= result
    show(as_json, values[0] if len(values) == 1 else {"evaluations": values}, "\n\n".join(texts))


def _check_options(file: list[str] | None, tasks: list[str] | None, of_tasks: dict[str, Any]) -> None:
    if not file and not tasks:
        raise UsageError(
            "Nothing to evaluate was given.",
            remedy="Pass --file FILE for the loss on text, or --tasks NAMES for scores on tasks.",
        )
    unused = [name for name, value in of_tasks.items() if value is not None]
    if unused and not tasks:
        option = unused[0].replace("_", "-")
        raise UsageError(f"--{option} is for tasks.", remedy="Name them with --tasks.")


def _text(result: "Evaluation") -> str:
    label = result.run if result.step is None else f"{result.run} at step {result.step}"
    base = result.base
    if base is None:
        return f"{label}: loss {result.loss:.4f}, perplexity {result.perplexity:.3f} over {result.tokens:,} tokens"
    rows = [
        (f"{label}, {result.tokens:,} tokens", "base", "tuned"),
        ("loss", f"{base.loss:.4f}", f"{result.loss:.4f}"),
        ("perplexity", f"{base.perplexity:.3f}", f"{result.perplexity:.3f}"),
    ]
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{name:{width}}  {left:>10}  {right:>10}" for name, left, right in rows)


def _table(results: "Sequence[Evaluation]") -> str:
    """One row per run; the base models have columns if there are any."""
    has_base = any(result.base for result in results)
    head = ["run_id", "step", "loss", "perplexity", "tokens"]
    if has_base:
        head += ["base_loss", "base_perplexity"]
    rows = [head]
    for result in results:
        row = [result.run, str(result.step), f"{result.loss:.4f}", f"{result.perplexity:.3f}", f"{result.tokens:,}"]
        if result.base:
            row += [f"{result.base.loss:.4f}", f"{result.base.perplexity:.3f}"]
        elif has_base:
            row += ["-", "-"]
        rows.append(row)
    table = format_table(rows, dropped_first=["step", "tokens"])
    if len({result.tokens for result in results}) == 1:
        return table
    note = "The numbers of tokens differ (another tokenizer or block size), so the losses may not be comparable."
    return f"{table}\n\n{note}"
