"""llmtrain fetch-data: a dataset of the Hugging Face hub as a directory."""

from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.options import JsonOption, show


def command(
    name: Annotated[str, typer.Argument(help="The dataset's name on the hub: owner/name.", show_default=False)],
    to: Annotated[str, typer.Option("--to", help="Directory to fill; a half-finished one is completed.")],
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit. Default: main.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Ask the hub even if complete: a branch may move.")] = False,
    json_: JsonOption = False,
) -> None:
    """Download a dataset's files from the hub into a directory; several processes at once download it once."""
    from llmtrain.config.logging import LoggingSection
    from llmtrain.hub.download import download_data
    from llmtrain.logs import setup_logging

    setup_logging(LoggingSection())
    value = download_data(name, revision, Path(to), force=again)
    state = "is complete" if value["downloaded"] else "is complete already"
    text = f"{name} {state} in {to}: {value['files']} files, {value['bytes'] / 1e6:.1f} MB, commit {value['commit']}."
    show(json_, value, text)
