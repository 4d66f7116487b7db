"""llmtrain report: runs as one file to mail, attach or commit."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llmtrain.commands.options import DEFAULT_ROOT, JsonOption, RootOption, complete_run, show
from llmtrain.core.files import disk_full, is_full
from llmtrain.core.text import format_bytes
from llmtrain.errors import UsageError

if TYPE_CHECKING:
    from llmtrain.runs.directory import RunDirectory

DEFAULT_FILE = Path("report.html")
COLUMNS_OF_IMAGES = 400  # points per curve, more than an image shows


def command(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Run ids or paths, or a sweep.", autocompletion=complete_run)
    ],
    to: Annotated[Path, typer.Option(help="File to write.")] = DEFAULT_FILE,
    format_: Annotated[
        Literal["html", "md"] | None,
        typer.Option(
            "--format",
            help="html: one file with interactive curves. md: Markdown, with an SVG per chart beside it. Default: by "
            "the name of the file.",
            show_default=False,
        ),
    ] = None,
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Write a report: curves, facts, config, ranks and causes of one run or several, in a file that needs neither a
    network nor llmtrain to be read. Runs on a cluster are fetched first (`llmtrain fetch RUN --only metrics`)."""
    from llmtrain.page.report import report_html, run_data
    from llmtrain.page.report_markdown import report_markdown

    if not to.name or os.path.isdir(to):  # noqa: PTH112 (Path.is_dir raises where a directory may not be read)
        raise UsageError(f"--to {to} is a directory.", remedy="Pass the name of a file, such as report.html.")
    sweep, found = _read(root, runs)
    contents = {}
    if format_ == "md" or (format_ is None and to.suffix.lower() in (".md", ".markdown")):
        if to == DEFAULT_FILE:
            to = to.with_suffix(".md")
        files = report_markdown([run_data(run, COLUMNS_OF_IMAGES) for run in found], to.stem)
        for name, text in files.items():
            path = to.with_name(name) if name.endswith(".svg") else to
            contents[path] = text
    else:
        contents[to] = report_html(found, sweep=sweep)
    for path, text in reversed(contents.items()):  # images before the file that shows them
        _write(path, text)
    paths = [str(path) for path in contents]
    size = sum(len(text.encode()) for text in contents.values())
    value = {"runs": [run.run_id for run in found], "files": paths, "bytes": size}
    show(json_, value, f"{', '.join(paths)} written ({format_bytes(size)}).")


def _read(root: str, runs: list[str]) -> "tuple[dict[str, Any] | None, list[RunDirectory]]":
    """The runs; of a sweep, its table and its best trials."""
    from llmtrain.page.sweeps import best_runs, sweep_values
    from llmtrain.runs.directory import find_run
    from llmtrain.sweep.record import list_sweeps

    for sweep in list_sweeps(root):
        if [sweep.name] == runs:
            values = sweep_values(sweep)
            return values, best_runs(values, root)
        if sweep.name in runs:
            raise UsageError(f"'{sweep.name}' is a sweep.", remedy="Write a report of it alone.")
    return None, [find_run(root, run) for run in dict.fromkeys(runs)]


def _write(path: Path, text: str) -> None:
    from llmtrain.core.files import write_atomic

    try:
        write_atomic(path, text)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        if is_full(problem):
            raise disk_full(path.parent, reason) from None
        raise UsageError(
            f"Cannot write {path}: {reason}.",
            remedy="Pass --to with a file in a directory that exists and that you may write to.",
        ) from None
