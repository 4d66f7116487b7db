"""llmtrain fetch-model: download a model from the Hugging Face hub."""

from pathlib import Path
from typing import Annotated, Any

import typer

from llmtrain.commands.options import JsonOption, show
from llmtrain.core.text import format_bytes, plural

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name on the hub: owner/name.", show_default=False)]
ToOption = Annotated[str, typer.Option("--to", help="Target directory; an incomplete download is resumed.")]
RevisionOption = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit. Default: main.")]
AgainOption = Annotated[bool, typer.Option("--again", help="Update a complete directory if the branch has moved.")]


def command(
    name: NameArgument,
    to: ToOption,
    revision: RevisionOption = None,
    code: Annotated[bool, typer.Option("--code", help="Include Python files (for model.trust_remote_code).")] = False,
    again: AgainOption = False,
    json_: JsonOption = False,
) -> None:
    """Download a model from the hub into a directory, for use as model.path. Concurrent processes download it once."""
    from llmtrain.hub.download import download_model

    log_downloads()
    show_download(json_, name, to, download_model(name, revision, Path(to), force=again, code=code))


def log_downloads() -> None:
    from llmtrain.config.logging import LoggingSection
    from llmtrain.core.logs import setup_logging

    setup_logging(LoggingSection())


def show_download(as_json: bool, name: str, to: str, value: dict[str, Any]) -> None:
    state = "downloaded to" if value["downloaded"] else "already complete in"
    size = f"{plural(value['files'], 'file')}, {format_bytes(value['bytes'])}"
    show(as_json, value, f"{name} {state} {to}: {size}, commit {value['commit']}.")
