"""llmtrain eval: loss and perplexity of a model on files."""

from typing import TYPE_CHECKING, Annotated

import typer

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
    from llmtrain.training.evaluate import EvalResult


def command(
    file: Annotated[list[str], typer.Option("--file", "-f", help="Text or .jsonl file, or glob. Repeatable.")],
    run: RunOption = None,
    adapter: AdapterOption = None,
    model: ModelOption = None,
    checkpoint: CheckpointOption = "best",
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per batch.")] = 8,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence. Default: that of the run.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Evaluate a run, adapter or model directory on files."""
    from llmtrain.training.shutdown import StopFlag

    with StopFlag() as stop, progress("Loading the model") as show_progress:
        from llmtrain.inference.evaluate import evaluate_files
        from llmtrain.inference.load import Source, load_model

        loaded = load_model(Source(run, adapter, model, checkpoint, root), device)
        stop.enter_loop(saves=False)
        results = evaluate_files(
            loaded, file, batch_size, block_size, stop=lambda: stop.requested, progress=show_progress
        )
    tuned = results["tuned"]
    value = {
        "run": loaded.label,
        "step": loaded.step,
        "files": file,
        "loss": tuned.loss,
        "perplexity": tuned.perplexity,
        "tokens": tuned.tokens,
        "base": {"loss": results["base"].loss, "perplexity": results["base"].perplexity} if "base" in results else None,
    }
    at = f" at step {loaded.step}" if loaded.step is not None else ""
    if "base" in results:
        text = _side_by_side(f"{loaded.label}{at}", results)
    else:
        text = (
            f"{loaded.label}{at}: loss {tuned.loss:.4f}, perplexity {tuned.perplexity:.3f} over {tuned.tokens:,} tokens"
        )
    show(json_, value, text)


def _side_by_side(label: str, results: "dict[str, EvalResult]") -> str:
    base, tuned = results["base"], results["tuned"]
    rows = [
        (f"{label}, {tuned.tokens:,} tokens", "base", "tuned"),
        ("loss", f"{base.loss:.4f}", f"{tuned.loss:.4f}"),
        ("perplexity", f"{base.perplexity:.3f}", f"{tuned.perplexity:.3f}"),
    ]
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{name:{width}}  {left:>10}  {right:>10}" for name, left, right in rows)
