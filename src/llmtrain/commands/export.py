"""llmtrain export: write a trained model in a format that transformers or peft loads."""

from pathlib import Path
from typing import Annotated

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
from llmtrain.errors import UsageError

DTYPES = ("float32", "bfloat16")


def command(
    to: Annotated[str, typer.Option("--to", help="Directory to create; an existing one must be empty.")],
    run: RunOption = None,
    adapter: AdapterOption = None,
    model: ModelOption = None,
    merge: Annotated[bool, typer.Option("--merge", help="LoRA runs: merge the adapter into the base model.")] = False,
    dtype: Annotated[str, typer.Option(help="Data type of the weights: float32 or bfloat16.")] = "float32",
    checkpoint: CheckpointOption = "best",
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Export a model to a directory that transformers loads, or peft for a LoRA run without --merge."""
    from llmtrain.inference.export import export_model
    from llmtrain.inference.load import Source, load_model

    if dtype not in DTYPES:
        raise UsageError(f"--dtype must be {' or '.join(DTYPES)}, got '{dtype}'.")
    loaded = load_model(Source(run, adapter, model, checkpoint, root), "cpu")
    source = adapter or model
    files = export_model(
        loaded, Path(to).expanduser(), merge, dtype, card_source=Path(source).expanduser() if source else None
    )
    value = {"run": loaded.label, "step": loaded.step, "val_loss": loaded.val_loss, "to": to, "files": files}
    loss = f" (validation loss {loaded.val_loss:.4f})" if loaded.val_loss is not None else ""
    at = f" at step {loaded.step}{loss}" if loaded.step is not None else ""
    show(json_, value, f"{loaded.label}{at} written to {to}: {', '.join(files)}")
