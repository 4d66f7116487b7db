"""What the commands that start worker processes share: train, node, doctor, smoke."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llmtrain.errors import JoinError

if TYPE_CHECKING:
    from llmtrain.config.schema import Config


def forwarded_options(config: str | None, overrides: list[str], json_: bool) -> list[str]:
    """The options of a command that its workers get too."""
    arguments = ["--config", config] if config else []
    for override in overrides:
        arguments += ["--set", override]
    if json_:
        arguments.append("--json")
    return arguments


@contextmanager
def diagnosed_join_errors(config: "Config | None") -> Iterator[None]:
    """When processes fail to join, print the findings of the local doctor checks before the error."""
    try:
        yield
    except JoinError as error:
        from llmtrain.config.schema import Config
        from llmtrain.doctor.examine import explain_failed_start

        if os.environ.get("LOCAL_RANK", "0") == "0":  # once per node
            explain_failed_start(error, config or Config())
        raise
