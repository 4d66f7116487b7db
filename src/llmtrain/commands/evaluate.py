"""llmtrain eval: loss and perplexity of a run on any text file."""

from typing import Annotated

import typer

from llmtrain.commands.options import DEFAULT_ROOT, CheckpointOption, JsonOption, RootOption, RunOption, show


def command(
    run: RunOption,
    file: Annotated[list[str], typer.Option("--file", "-f", help="Text file or glob. Repeatable.")],
    checkpoint: CheckpointOption = "best",
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Measure a run's model on text files."""
    from llmtrain.training.inference import evaluate_files, load_run

    loaded = load_run(root, run, checkpoint, device)
    result = evaluate_files(loaded, file, batch_size)
    value = {
        "run": loaded.run_id,
        "step": loaded.step,
        "files": file,
        "loss": result.loss,
        "perplexity": result.perplexity,
        "tokens": result.tokens,
    }
    text = (
        f"{loaded.run_id} at step {loaded.step}: loss {result.loss:.4f}, perplexity {result.perplexity:.3f} "
        f"over {result.tokens:,} tokens"
    )
    show(json_, value, text)
