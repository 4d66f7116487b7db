"""llmtrain lint: known traps in training manifests, anyone's."""

from typing import Annotated

import typer

from llmtrain.commands.options import JsonOption, show

FOUND_SOMETHING = 1  # the exit code


def command(
    files: Annotated[
        list[str], typer.Argument(help="Manifests: files, directories, or - for standard input.", metavar="FILE")
    ],
    strict: Annotated[bool, typer.Option("--strict", help="Let advice count for the exit code too.")] = False,
    json_: JsonOption = False,
) -> None:
    """Look for known traps in training manifests, anyone's, before they are applied. Each is told with its line, why,
    and the fix. Ends with 1 when there is an error or a warning, with 64 when a file is no manifest."""
    from llmtrain.lint.check_manifests import lint
    from llmtrain.lint.source import read_sources

    report = lint(read_sources(files))
    show(json_, report.as_dict(is_strict=strict), report.text())
    if not report.is_ok(is_strict=strict):
        raise typer.Exit(FOUND_SOMETHING)
