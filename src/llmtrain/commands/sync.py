"""llmtrain sync: a run directory copied to object storage."""

from typing import Annotated

import typer

from llmtrain.commands.options import DEFAULT_ROOT, JsonOption, RootOption, show


def command(
    run: Annotated[str, typer.Argument(help="Run id or path.")],
    uri: Annotated[str, typer.Argument(help="Where to: s3://bucket or s3://bucket/prefix.", show_default=False)],
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Copy a run directory to S3 or a store like it; repeated, it sends only what is new."""
    from llmtrain.config.logging import LoggingSection
    from llmtrain.logs import setup_logging
    from llmtrain.runs.directory import find_run
    from llmtrain.runs.sync import sync_run

    setup_logging(LoggingSection())
    value = sync_run(find_run(root, run), uri)
    text = f"{value['uri']}: {value['files']} files sent, {value['bytes'] / 1e6:.1f} MB; {value['skipped']} were there."
    show(json_, value, text)
