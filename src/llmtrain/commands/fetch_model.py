"""llmtrain fetch-model: a model of the Hugging Face hub as a directory."""

from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.options import JsonOption, show


def command(
    name: Annotated[str, typer.Argument(help="The model's name on the hub: owner/name.", show_default=False)],
    to: Annotated[str, typer.Option("--to", help="Directory to fill; a half-finished one is completed.")],
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit. Default: main.")] = None,
    code: Annotated[bool, typer.Option("--code", help="Fetch its Python files too (model.trust_remote_code).")] = False,
    again: Annotated[bool, typer.Option("--again", help="Ask the hub even if complete: a branch may move.")] = False,
    json_: JsonOption = False,
) -> None:
    """Download a model from the hub into a directory, for model.path; several processes at once download it once."""
    from llmtrain.config.logging import LoggingSection
    from llmtrain.hub.download import download_model
    from llmtrain.logs import setup_logging

    setup_logging(LoggingSection())
    value = download_model(name, revision, Path(to), force=again, code=code)
    state = "is complete" if value["downloaded"] else "is complete already"
    text = f"{name} {state} in {to}: {value['files']} files, {value['bytes'] / 1e6:.1f} MB, commit {value['commit']}."
    show(json_, value, text)
