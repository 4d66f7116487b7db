"""llmtrain export: a run's model in the format that transformers loads."""

from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.options import DEFAULT_ROOT, CheckpointOption, JsonOption, RootOption, RunOption, show


def command(
    run: RunOption,
    to: Annotated[str, typer.Option("--to", help="Directory to write; it must not exist, or be empty.")],
    checkpoint: CheckpointOption = "best",
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Write a run's model as a directory that transformers loads as GPT-2, with the tokenizer beside."""
    from llmtrain.training.inference import export_run, load_run

    loaded = load_run(root, run, checkpoint, "cpu")
    files = export_run(loaded, Path(to).expanduser())
    value = {"run": loaded.run_id, "step": loaded.step, "to": to, "files": files}
    show(json_, value, f"{loaded.run_id} at step {loaded.step} written to {to}: {', '.join(files)}")
