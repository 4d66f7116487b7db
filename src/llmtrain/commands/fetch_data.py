"""llmtrain fetch-data: download a dataset from the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.options import JsonOption, show
from llmtrain.text import format_bytes, plural


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name on the hub: owner/name.", show_default=False)],
    to: Annotated[str, typer.Option("--to", help="Target directory; an incomplete download is resumed.")],
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit. Default: main.")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Update a complete directory if the branch has moved.")
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Download the files of a dataset from the hub into a directory. Concurrent processes download it once."""
    from llmtrain.config.logging import LoggingSection
    from llmtrain.hub.download import download_data
    from llmtrain.logs import setup_logging

    setup_logging(LoggingSection())
    value = download_data(name, revision, Path(to), force=again)
    state = "downloaded to" if value["downloaded"] else "already complete in"
    size = f"{plural(value['files'], 'file')}, {format_bytes(value['bytes'])}"
    show(json_, value, f"{name} {state} {to}: {size}, commit {value['commit']}.")
