"""llmtrain sync: copy a run directory to object storage."""

from typing import Annotated

import typer

from llmtrain.commands.options import DEFAULT_ROOT, JsonOption, RootOption, show
from llmtrain.core.text import format_bytes, plural


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id or path.")],
    uri: Annotated[
        str, typer.Argument(metavar="URI", help="Target: s3://bucket or s3://bucket/prefix.", show_default=False)
    ],
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Copy a run directory to S3 or a compatible store. Repeated, it sends only new files."""
    from llmtrain.config.logging import LoggingSection
    from llmtrain.core.logs import setup_logging
    from llmtrain.runs.directory import find_run
    from llmtrain.runs.sync import sync_run

    setup_logging(LoggingSection())
    value = sync_run(find_run(root, run), uri)
    sent = f"{plural(value['files'], 'file')} sent ({format_bytes(value['bytes'])})"
    show(json_, value, f"{value['uri']}: {sent}, {value['skipped']} already there.")
