"""llmtrain eval: loss and perplexity of a model on files."""

from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.arguments import MINIMUM
from llmtrain.commands.options import (
    DEFAULT_ROOT,
    AdapterOption,
    CheckpointOption,
    JsonOption,
    ModelOption,
    RootOption,
    RunOption,
    show,
)
from llmtrain.commands.progress import progress

if TYPE_CHECKING:
    from llmtrain.inference.model import Evaluation


def command(
    file: Annotated[list[str], typer.Option("--file", "-f", help="Text or .jsonl file, or glob. Repeatable.")],
    run: RunOption = None,
    adapter: AdapterOption = None,
    model: ModelOption = None,
    checkpoint: CheckpointOption = "best",
    batch_size: Annotated[int, typer.Option(min=MINIMUM["batch_size"], help="Sequences per batch.")] = 8,
    block_size: Annotated[
        int | None, typer.Option(min=MINIMUM["block_size"], help="Tokens per sequence. Default: that of the run.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Evaluate a run, adapter or model directory on files."""
    from llmtrain.training.shutdown import StopFlag

    with StopFlag() as stop, progress("Loading the model") as show_progress:
        from llmtrain.inference.load import Source
        from llmtrain.inference.model import Model

        loaded = Model(Source(run, adapter, model, checkpoint, root), device)
        stop.enter_loop(saves=False)
        result = loaded.evaluate(
            file, batch_size=batch_size, block_size=block_size, stop=stop, on_progress=show_progress
        )
    show(json_, result.as_dict(), _text(result))


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
