"""Output to a terminal. Text from clusters, models and files may contain escape sequences, which a terminal executes:
commands print with `say`, or remove them with `printable`."""

import io
import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TextIO

Color = Literal["red", "green", "yellow", "cyan"]
_COLORS: dict[Color, int] = {"red": 31, "green": 32, "yellow": 33, "cyan": 36}
_NUMBER = re.compile(r"-|[-+<]?\d[\d,.]*(e[-+]?\d+)?[kMB%]?[* ]?( ?(s|min|m|h|d))?|\d+(/|:)[\d:-]+|nan|inf")
"""A cell of a column of numbers: 3.0274, 1,024, 34.7k, 30/60, 9 min, 0:00:16, 2.85*, or - for none."""
_MIN_CELL = 12
# Removed: mostly colors of a log.
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# Replaced: control characters except line break and tab, bidirectional overrides, and unpaired surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def open_missing_streams() -> None:
    """Replace streams that the caller has closed (`<&-`), as services do, by empty ones. Otherwise the next file that
    is opened, also by a child process, takes the place of standard output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


def print_in_any_encoding() -> None:
    """Write `\\u2026` for a character that the encoding of standard output or error lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def printable(text: str) -> str:
    """The text without escape sequences and control characters."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", _SEQUENCE.sub("", text))


def printable_line(text: str) -> str:
    """Like printable, on one line, so that a line break in a message does not look like another row."""
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


def color(text: str, name: Color) -> str:
    return f"\x1b[{_COLORS[name]}m{text}\x1b[0m"


def discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, including the content of its buffer."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)


def say(text: object, file: TextIO | None = None, colors: Mapping[str, Color] | None = None) -> None:
    """Print text for people, without escape sequences. `colors`: words of it, which get a color in a terminal where
    they occur first."""
    stream = sys.stdout if file is None else file
    shown = printable(str(text))
    if colors and has_color(stream):
        for word, name in colors.items():
            shown = shown.replace(word, color(word, name), 1)
    print(shown, file=stream, flush=True)


def format_table(rows: Sequence[Sequence[str]], dropped_first: Sequence[str] = ()) -> str:
    """format_columns for standard output: no wider than the terminal; of any width elsewhere."""
    return format_columns(rows, stream_width(sys.stdout), dropped_first)


def format_columns(rows: Sequence[Sequence[str]], width: int | None = None, dropped_first: Sequence[str] = ()) -> str:
    """A head and rows of cells as columns, two spaces apart; numbers are right-aligned. Columns that do not fit into
    `width` are left out in the order of `dropped_first`; then long cells are cut."""
    cells = [[printable_line(cell) for cell in row] for row in rows]
    if width is not None:
        cells = _fit_columns(cells, width, dropped_first)
    columns = []
    for head, *column in zip(*cells, strict=True):
        size = max(map(len, (head, *column)))
        if column and all(_NUMBER.fullmatch(cell) for cell in column):
            columns.append([cell.rjust(size) for cell in (head, *column)])
        else:
            columns.append([cell.ljust(size) for cell in (head, *column)])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def _fit_columns(cells: list[list[str]], width: int, dropped_first: Sequence[str]) -> list[list[str]]:
    for name in dropped_first:
        if sum(_widths(cells)) <= width + 2:  # the last column has no space after it
            return cells
        if name in cells[0]:
            index = cells[0].index(name)
            cells = [row[:index] + row[index + 1 :] for row in cells]
    while (surplus := sum(_widths(cells)) - width - 2) > 0:
        widths = _widths(cells)
        widest = widths.index(max(widths))
        size = max(_MIN_CELL, widths[widest] - 2 - surplus)
        if size >= widths[widest] - 2:
            break  # narrower than anyone works with
        for row in cells:
            if len(row[widest]) > size:
                row[widest] = f"{row[widest][: size - 1]}…"
    return cells


def _widths(cells: list[list[str]]) -> list[int]:
    """Of each column, with the space after it."""
    return [max(map(len, column)) + 2 for column in zip(*cells, strict=True)]
