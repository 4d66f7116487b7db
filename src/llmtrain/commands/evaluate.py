"""llmtrain eval: loss and perplexity of models on files."""

from typing import TYPE_CHECKING, Annotated

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
from llmtrain.core.arguments import MINIMUM, Source
from llmtrain.core.terminal import format_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmtrain.inference.loaded_model import Evaluation


def command(
    file: Annotated[list[str], typer.Option("--file", "-f", help="File of text or examples, or glob. Repeatable.")],
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
    batch_size: Annotated[int, typer.Option(min=MINIMUM["batch_size"], help="Sequences per batch.")] = 8,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=MINIMUM["block_size"],
            help="Tokens per sequence. Default: that of the run. A shorter text is one sequence.",
        ),
    ] = None,
    device: DeviceOption = "auto",
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Evaluate runs, an adapter or a model directory on files."""
    from llmtrain.runs.directory import find_run
    from llmtrain.training.shutdown import StopFlag

    with StopFlag() as stop, progress("Loading the model") as show_progress:
        from llmtrain.inference.loaded_model import Model

        named = [*(runs or ()), *(run or ())]
        for each in named:
            find_run(root, each)  # raises for a run that does not exist, before the others are evaluated

        def evaluate(source: Source) -> "Evaluation":
            loaded = Model(source, device)
            stop.enter_loop(saves=False)
            return loaded.evaluate(
                file, batch_size=batch_size, block_size=block_size, stop=stop, on_progress=show_progress
            )

        names = named or (None,)  # None: an adapter or a model directory
        results = [evaluate(Source(name, adapter, model, checkpoint, root)) for name in names]
    if len(results) == 1:
        show(json_, results[0].as_dict(), _text(results[0]))
    else:
        show(json_, {"evaluations": [result.as_dict() for result in results]}, _table(results))


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
