"""Reading the files of a run directory: the end of its metrics, its logs, and whether something has changed. Links are
not followed out of the directory."""

import os
from collections.abc import Iterable
from pathlib import Path

from llmtrain.config.logging import LoggingSection
from llmtrain.files import open_text
from llmtrain.page.series import Row, parse_rows
from llmtrain.runs.directory import RunDirectory

_TAIL_BYTES = 1 << 13
_MAX_TRIED = 20
_SEARCHED_BYTES = 1 << 22


def log_path(run: RunDirectory, rank: int) -> Path | None:
    """The log file of a rank; None if it has none. Rank 0 writes the file that the config names."""
    own = run.logs / f"rank-{rank}.log"
    paths = [own] if rank else [path for path in _log_files(run) if not path.name.startswith("rank-")] or [own]
    return next((path for path in paths if is_inside(run, path) and is_file(path)), None)


def log_ranks(run: RunDirectory) -> list[int]:
    """Ranks that have a log file."""
    numbers = (path.stem.removeprefix("rank-") for path in _log_files(run) if path.name.startswith("rank-"))
    others = {int(number) for number in numbers if number.isdecimal()}
    return sorted(others | ({0} if log_path(run, 0) else set()))


def _log_files(run: RunDirectory) -> list[Path]:
    """Its default name first: logging.file_name may be any."""
    try:
        paths = [path for path in run.logs.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []
    return sorted(paths, key=lambda path: (path.name != LoggingSection().file_name, path.name))


def last_rows(metrics: Path) -> tuple[Row, Row]:
    """The last training row and the last evaluation; empty if they are further from the end than is read. Searches the
    bytes: parsing the rows of thousands of steps between two evaluations would take too long."""
    found: dict[bytes, Row] = {b'"train/loss"': {}, b'"val/loss"': {}}
    for count in (_TAIL_BYTES, _SEARCHED_BYTES):
        data, is_whole = tail(metrics, count)
        for name in [name for name, row in found.items() if not row]:
            found[name] = _last_with(data, name)
        if is_whole or all(found.values()):
            break
    train, val = found.values()
    return train, val


def tail(path: Path, count: int) -> tuple[bytes, bool]:
    """The complete lines at the end of a file, and whether that is all of it."""
    try:
        with open_text(path) as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - count)
            data = os.pread(file.fileno(), size - begin, begin)
    except OSError:
        return b"", True
    return data[: data.rfind(b"\n") + 1], begin == 0


def _last_with(lines: bytes, name: bytes) -> Row:
    """The last row that has a name; a row that is cut off or damaged is skipped."""
    end = len(lines)
    for _ in range(_MAX_TRIED):
        found = lines.rfind(name, 0, end)
        if found < 0:
            return {}
        begin = lines.rfind(b"\n", 0, found) + 1
        if rows := parse_rows(lines[begin : lines.find(b"\n", found)]):
            return rows[0]
        end = begin
    return {}


def is_inside(run: RunDirectory, path: Path) -> bool:
    """Whether a path is in the run directory: a run that somebody sent may have links to other files."""
    try:
        return path.resolve().is_relative_to(run.path.resolve())
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        return False


def is_file(path: Path) -> bool:
    """As Path.is_file, but False in a directory that may not be read, where Path.is_file raises."""
    try:
        return path.is_file()
    except OSError:
        return False


def signature_of(paths: Iterable[Path]) -> tuple[tuple[int, int], ...]:
    """Changes when one of the files or directories does."""
    found = []
    for path in paths:
        try:
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size))
        except OSError:
            found.append((0, 0))
    return tuple(found)
