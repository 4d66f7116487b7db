"""Options that several commands share."""

import json
import sys
from typing import Annotated, Any

import typer

from llmtrain.terminal import discard, say

ConfigOption = Annotated[
    str | None,
    typer.Option("--config", "-c", help="Config file, or the name of a preset.", show_default=False),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override one field: section.field=value. Repeatable.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
RunOption = Annotated[
    str | None, typer.Option("--run", help="Run id, or the path of a run directory.", show_default=False)
]
AdapterOption = Annotated[
    str | None, typer.Option("--adapter", help="Directory of a peft adapter.", show_default=False)
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Model directory or name on the hub: by itself, or as the base of --run or --adapter.",
        show_default=False,
    ),
]
ModelDirOption = Annotated[
    str | None,
    typer.Option("--model-local-dir", help="Short for model.path with model.local_files_only.", show_default=False),
]
TokenizerDirOption = Annotated[
    str | None, typer.Option("--tokenizer-local-dir", help="Short for model.tokenizer_path.", show_default=False)
]
LocalOnlyOption = Annotated[bool, typer.Option("--local-files-only", help="Short for model.local_files_only.")]
RootOption = Annotated[str, typer.Option("--root", help="Directory of all runs.")]
CheckpointOption = Annotated[
    str, typer.Option("--checkpoint", help="best, latest or step_<N>. best falls back to latest.")
]

DEFAULT_ROOT = "runs"
"""The default of output.root_dir, written out because importing the schema takes longer than --help may."""


def shorthands(overrides: list[str] | None, model: str | None, tokenizer: str | None, is_local: bool) -> list[str]:
    """The overrides that the short options stand for, behind those given."""
    more = [f"model.path={json.dumps(model)}"] if model is not None else []
    more += [f"model.tokenizer_path={json.dumps(tokenizer)}"] if tokenizer is not None else []
    more += ["model.local_files_only=true"] if is_local or model is not None else []
    return [*(overrides or []), *more]


def show(as_json: bool, value: dict[str, Any], text: str) -> None:
    """The result of a command: one JSON object, or text for a person. A reader that has gone (`| head`) changes
    nothing about how the command ended."""
    try:
        if as_json:
            print(json.dumps(value, indent=2), flush=True)
        else:
            say(text)
    except BrokenPipeError:
        discard(sys.stdout)
