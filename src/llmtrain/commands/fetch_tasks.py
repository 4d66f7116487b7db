"""llmtrain fetch-tasks: download the data of tasks from the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.fetch_model import AgainOption, log_downloads
from llmtrain.commands.options import JsonOption, show
from llmtrain.core.text import format_bytes, plural


def command(
    names: Annotated[
        str, typer.Argument(metavar="NAMES", help="Tasks of lm_eval, separated by commas.", show_default=False)
    ],
    to: Annotated[str, typer.Option("--to", help="Directory of tasks; what is complete in it is not fetched again.")],
    again: AgainOption = False,
    json_: JsonOption = False,
) -> None:
    """Download what tasks need from the hub, with hashes, for `llmtrain eval --tasks` without a network."""
    from llmtrain.config.task_specs import parse_tasks
    from llmtrain.hub.tasks import fetch_tasks

    log_downloads()
    stock = [spec.name for spec in parse_tasks([names], "fetch-tasks") if spec.is_stock]
    results = fetch_tasks(stock, Path(to), force=again)
    lines = []
    for result in results:
        state = "downloaded to" if result["downloaded"] else "already complete in"
        size = f"{plural(result['files'], 'file')}, {format_bytes(result['bytes'])}"
        lines.append(f"{result['dataset']} {state} {result['to']}: {size}, commit {result['commit']}.")
    text = "\n".join(lines) or "Nothing to download: these tasks come with llmtrain."
    show(json_, {"to": to, "datasets": results}, text)
