"""llmtrain export: a trained model in the format that transformers or peft loads."""

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
    to: Annotated[str, typer.Option("--to", help="Directory to write; it must not exist, or be empty.")],
    run: RunOption = None,
    adapter: AdapterOption = None,
    model: ModelOption = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a LoRA run: write a whole model, with the adapter merged in.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 for half the size.")] = "float32",
    checkpoint: CheckpointOption = "best",
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Write a model as a directory that transformers loads (or peft: a LoRA run without --merge)."""
    from llmtrain.inference.inference import export_model
    from llmtrain.inference.load import Source, load_model

    if dtype not in DTYPES:
        raise UsageError(f"--dtype '{dtype}' is unknown.", known=DTYPES)
    loaded = load_model(Source(run, adapter, model, checkpoint, root), "cpu")
    named = adapter or model
    files = export_model(
        loaded, Path(to).expanduser(), merge, dtype, card_of=Path(named).expanduser() if named else None
    )
    value = {"run": loaded.label, "step": loaded.step, "val_loss": loaded.val_loss, "to": to, "files": files}
    loss = f" (validation loss {loaded.val_loss:.4f})" if loaded.val_loss is not None else ""
    at = f" at step {loaded.step}{loss}" if loaded.step is not None else ""
    show(json_, value, f"{loaded.label}{at} written to {to}: {', '.join(files)}")
