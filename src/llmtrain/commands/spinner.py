"""Progress of a slow command in a terminal, on standard error; it disappears when the command has its result."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from llmtrain.core.progress import is_rank0


class ShowProgress(Protocol):
    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Show what is being done, and how much of it is done if the total is known."""


def show_nothing(what: str, done: int = 0, total: int | None = None) -> None:
    """For a log or a pipe."""


@contextmanager
def progress(what: str) -> Iterator[ShowProgress]:
    """Show that the command is at work on `what`, unless standard error is not a terminal, or rank 0 does."""
    if not sys.stderr.isatty() or not is_rank0():
        yield show_nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(what, total=None, count="")

        def show(what: str, done: int = 0, total: int | None = None) -> None:
            count = "" if total is None else f"{done}/{total}"
            bar.update(task, description=what, completed=done, total=total, count=count)

        yield show
