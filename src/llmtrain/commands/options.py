"""Options that several commands share, and the output of a result."""

import json
import sys
from typing import Annotated, Any

import typer

from llmtrain.terminal import discard, say


def complete_preset(incomplete: str) -> list[str]:
    """Presets, for shell completion; the shell itself completes files if there is no such preset."""
    from llmtrain.config.load import list_presets

    return [name for name in list_presets() if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Runs in the default directory, for shell completion."""
    from llmtrain.runs.directory import list_runs

    return [run.run_id for run in list_runs(DEFAULT_ROOT) if run.run_id.startswith(incomplete)]


ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="CONFIG",
        help="Config file or name of a preset.",
        show_default=False,
        autocompletion=complete_preset,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a config field: section.field=value. Repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
RunOption = Annotated[
    str | None,
    typer.Option("--run", help="Run id or path of a run directory.", show_default=False, autocompletion=complete_run),
]
AdapterOption = Annotated[
    str | None, typer.Option("--adapter", help="Directory of a peft adapter.", show_default=False)
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Model directory or name on the hub; with --run or --adapter: the base model.",
        show_default=False,
    ),
]
ModelDirOption = Annotated[
    str | None,
    typer.Option("--model-local-dir", help="Set model.path, and model.local_files_only to true.", show_default=False),
]
TokenizerDirOption = Annotated[
    str | None, typer.Option("--tokenizer-local-dir", help="Set model.tokenizer_path.", show_default=False)
]
LocalOnlyOption = Annotated[bool, typer.Option("--local-files-only", help="Set model.local_files_only to true.")]
RootOption = Annotated[str, typer.Option("--root", help="Directory of all runs.")]
CheckpointOption = Annotated[
    str, typer.Option("--checkpoint", help="best (or latest if there is none), latest, or step_<N>.")
]

DEFAULT_ROOT = "runs"
"""The default of output.root_dir, repeated here because importing the schema would slow down --help."""


def shorthands(overrides: list[str] | None, model: str | None, tokenizer: str | None, is_local: bool) -> list[str]:
    """The overrides, followed by those of the shorthand options."""
    more = [f"model.path={json.dumps(model)}"] if model is not None else []
    more += [f"model.tokenizer_path={json.dumps(tokenizer)}"] if tokenizer is not None else []
    more += ["model.local_files_only=true"] if is_local or model is not None else []
    return [*(overrides or []), *more]


def show(as_json: bool, value: dict[str, Any], text: str) -> None:
    """Print the result of a command as one JSON object, or as text. A closed pipe (`| head`) is not an error."""
    try:
        if as_json:
            print(json.dumps(value, indent=2), flush=True)
        else:
            say(text)
    except BrokenPipeError:
        discard(sys.stdout)
