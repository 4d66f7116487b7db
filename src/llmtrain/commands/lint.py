"""llmtrain lint: check training manifests for common mistakes."""

import os
import sys
from typing import Annotated

import typer

from llmtrain.commands.options import JsonOption, show
from llmtrain.errors import ExitCode


def command(
    files: Annotated[
        list[str], typer.Argument(help="Manifests: files, directories, or - for standard input.", metavar="FILE")
    ],
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", help="Do not report this rule. Repeatable.", metavar="RULE")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 on advice too.")] = False,
    json_: JsonOption = False,
) -> None:
    """Check training manifests for common mistakes. Prints file, line, reason and fix of each, errors first. Exits with
    1 on errors and warnings, with 2 if no pods in the files train, with 64 if a file is not a manifest."""
    from llmtrain.lint.check_manifests import lint
    from llmtrain.lint.source import read_sources

    report = lint(read_sources(files), ignore or [])
    if _is_colored() and not json_:
        from rich.console import Console

        Console(highlight=False, soft_wrap=True).print(report.colored())
    else:
        show(json_, report.as_dict(is_strict=strict), report.text())
    if report.is_unknown:
        raise typer.Exit(ExitCode.CANNOT_TELL)
    if not report.is_ok(is_strict=strict):
        raise typer.Exit(ExitCode.PROBLEM)


def _is_colored() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
