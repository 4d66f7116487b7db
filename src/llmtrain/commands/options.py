"""Options that several commands share."""

import json
from typing import Annotated, Any

import typer

ConfigOption = Annotated[
    str | None,
    typer.Option("--config", "-c", help="Config file, or the name of a preset.", show_default=False),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override one field: section.field=value. Repeatable.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
RunOption = Annotated[str, typer.Option("--run", help="Run id, or the path of a run directory.")]
RootOption = Annotated[str, typer.Option("--root", help="Directory of all runs.")]
CheckpointOption = Annotated[
    str, typer.Option("--checkpoint", help="best, latest or step_<N>. best falls back to latest.")
]

DEFAULT_ROOT = "runs"
"""The default of output.root_dir, written out because importing the schema takes longer than --help may."""


def readable(text: str) -> str:
    """Text of a model, safe for a terminal: control characters (a bell, an escape sequence) are not sent to it."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def show(as_json: bool, value: dict[str, Any], text: str) -> None:
    """The result of a command: one JSON object, or text for a person."""
    print(json.dumps(value, indent=2) if as_json else text)
