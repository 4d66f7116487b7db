"""llmtrain fetch-data: download a dataset from the Hugging Face hub."""

from pathlib import Path

from llmtrain.commands.fetch_model import (
    AgainOption,
    NameArgument,
    RevisionOption,
    ToOption,
    log_downloads,
    show_download,
)
from llmtrain.commands.options import JsonOption


def command(
    name: NameArgument,
    to: ToOption,
    revision: RevisionOption = None,
    again: AgainOption = False,
    json_: JsonOption = False,
) -> None:
    """Download the files of a dataset from the hub into a directory. Concurrent processes download it once."""
    from llmtrain.hub.download import download_data

    log_downloads()
    show_download(json_, name, to, download_data(name, revision, Path(to), force=again))
