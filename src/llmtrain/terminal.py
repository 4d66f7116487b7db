"""Output to a terminal. Text from clusters, models and files may contain escape sequences, which a terminal executes:
commands print with `say`, or remove them with `printable`."""

import io
import os
import re
import sys
from collections.abc import Sequence
from typing import TextIO

# Removed: mostly colors of a log.
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# Replaced: control characters except line break and tab, bidirectional overrides, and unpaired surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def print_in_any_encoding() -> None:
    """Write `\\u2026` for a character that the encoding of standard output or error lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def printable(text: str) -> str:
    """The text without escape sequences and control characters."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", _SEQUENCE.sub("", text))


def printable_line(text: str) -> str:
    """As printable, on one line, so that a line break in a message does not look like another row."""
    return printable(" ".join(text.splitlines()).replace("\t", " "))


def discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, including the content of its buffer."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)


def say(text: object, file: TextIO | None = None) -> None:
    """Print text for people, without escape sequences."""
    print(printable(str(text)), file=sys.stdout if file is None else file, flush=True)


def format_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as left-aligned columns, two spaces apart."""
    cells = [[printable_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )
