"""Text for people. What a cluster, a model or a file says may hold escape sequences, on which a terminal would act:
every command prints through `say`, or cleans with `printable` what it draws itself."""

import io
import os
import re
import sys
from collections.abc import Sequence
from typing import TextIO

# Colors and cursor movements go without a trace: most of them are colors of a log.
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# Control characters but for line break and tab; what turns the direction of writing around; halves of characters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def print_in_any_encoding() -> None:
    """Let standard output and standard error write `\\u2026` for a character that their encoding lacks. A command that
    has done its work must not fail because it cannot print it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def printable(text: str) -> str:
    """The text without anything that a terminal would act on."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", _SEQUENCE.sub("", text))


def printable_line(text: str) -> str:
    """As printable, in one line: a line break in a message must not look like another row."""
    return printable(" ".join(text.splitlines()).replace("\t", " "))


def discard(stream: TextIO) -> None:
    """Write what is left in the buffer of a stream nowhere, and whatever follows."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def say(text: object, file: TextIO | None = None) -> None:
    """Print for a person."""
    print(printable(str(text)), file=sys.stdout if file is None else file, flush=True)


def format_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as left-aligned columns, two spaces apart."""
    cells = [[printable_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )
