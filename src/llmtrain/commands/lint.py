"""llmtrain lint: check training manifests for common mistakes."""

from typing import Annotated

import typer

from llmtrain.commands.options import JsonOption, show

PROBLEMS_FOUND = 1  # exit code


def command(
    files: Annotated[
        list[str], typer.Argument(help="Manifests: files, directories, or - for standard input.", metavar="FILE")
    ],
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 on advice too.")] = False,
    json_: JsonOption = False,
) -> None:
    """Check training manifests for common mistakes. Prints file, line, reason and fix of each. Exits with 1 on errors
    and warnings, with 64 if a file is not a manifest."""
    from llmtrain.lint.check_manifests import lint
    from llmtrain.lint.source import read_sources

    report = lint(read_sources(files))
    show(json_, report.as_dict(is_strict=strict), report.text())
    if not report.is_ok(is_strict=strict):
        raise typer.Exit(PROBLEMS_FOUND)
