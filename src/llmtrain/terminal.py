"""Output to a terminal. Text from clusters, models and files may contain escape sequences, which a terminal executes:
commands print with `say`, or remove them with `printable`."""

import io
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Literal, TextIO

_COLORS = {"red": 31, "yellow": 33, "cyan": 36}
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


def stream_width(stream: TextIO) -> int | None:
    """Columns of the terminal that a stream writes to; None if it is not a terminal."""
    if not stream.isatty():
        return None
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def fit_line(text: str, width: int, indent: int = 0) -> str:
    """The text wrapped between words, never inside one; continuation lines are indented."""
    lines = []
    for line in text.splitlines() or [text]:
        is_wide = len(line) > width > indent
        pieces = textwrap.wrap(
            line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
        )
        lines += pieces if is_wide else [line]
    return "\n".join(lines)


def has_color(stream: TextIO) -> bool:
    """Whether a stream shows colors: a terminal, unless NO_COLOR is set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def color(text: str, name: Literal["red", "yellow", "cyan"]) -> str:
    return f"\x1b[{_COLORS[name]}m{text}\x1b[0m"


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
