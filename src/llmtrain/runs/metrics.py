"""metrics.jsonl: one JSON object per line, appended during training. A resumed run drops rows of steps it will redo."""

import errno
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from llmtrain.core.files import open_text, write_atomic
from llmtrain.core.logs import warn
from llmtrain.core.text import plural
from llmtrain.runs.json_values import MAX_INTEGER, finite

Row = dict[str, Any]
SYNC_BYTES = 1 << 20
"""Unsynced rows are kept in memory until the next checkpoint, up to this size."""
CLOSE_SEC = 1.0
_TAIL_BYTES = 1 << 13
_SEARCHED_BYTES = 1 << 22
"""The end of a file that is searched for the last rows: first a little of it, then more."""
_MAX_TRIED = 20


class MetricsLog:
    """Rows are kept in memory until they are synced to disk. After a failed write or fsync they are written again, at
    the same offset: none is lost or duplicated."""

    def __init__(self, path: Path, keep_until_step: int, keep_evaluations_until: int) -> None:
        """Open for appending. Rows that the run will repeat are dropped first, and so is an incomplete last line."""
        if path.exists():
            rows = (row for row in read_metrics(path) if row["step"] <= keep_until_step)
            kept = [row for row in rows if "val/loss" not in row or row["step"] <= keep_evaluations_until]
            write_atomic(path, "".join(_line(row) for row in kept))
        self._path = path
        # Not O_APPEND: rows may be written again at the same offset.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._synced = os.fstat(self._descriptor).st_size
        self._rows = b""
        """Rows that are not synced yet."""
        self._written = 0
        """The number of their bytes that are in the file."""
        self._has_warned = False

    def append(self, row: Row) -> None:
        """Write a row; if that fails, it is written with a later one."""
        self._rows += _line(row).encode()
        try:
            self._write()
        except OSError as problem:
            self._warn(problem)
        if len(self._rows) > SYNC_BYTES:
            self.sync()

    def sync(self) -> bool:
        """Sync all rows to disk before a checkpoint is published; returns whether that succeeded."""
        for _ in range(2):  # most storage errors are gone at once, or persist
            try:
                self._write()
                os.fsync(self._descriptor)
            except OSError as problem:
                self._written = 0  # the kernel may have dropped pages that it could not write
                self._warn(problem)
            else:
                self._synced += len(self._rows)
                self._rows = b""
                self._written = 0
                return True
        return False

    def close(self) -> None:
        deadline = time.monotonic() + CLOSE_SEC
        while not (is_synced := self.sync()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not is_synced:
            with suppress(OSError):
                self._write()
            count = self._rows[self._written :].count(b"\n")
            if count:
                warn("TRAIN", f"could not write {plural(count, 'row')} of {self._path}")
        with suppress(OSError):
            os.close(self._descriptor)

    def _write(self) -> None:
        missing = self._rows[self._written :]
        if not missing:
            return
        end = self._synced + self._written
        try:
            if os.pwrite(self._descriptor, missing, end) < len(missing):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, end)  # complete lines only
            raise
        self._written = len(self._rows)

    def _warn(self, problem: OSError) -> None:
        if not self._has_warned:
            warn("TRAIN", f"cannot write {self._path} ({problem.strerror}); rows are kept in memory")
        self._has_warned = True


def read_metrics(path: Path) -> Iterator[Row]:
    """Rows in order. Invalid lines, such as a last line cut off by a crash, are skipped."""
    if not path.exists():
        return
    with open_text(path, errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row


def wide_rows(rows: Iterable[Row]) -> list[Row]:
    """One row per step with all of its metrics, and the same keys in each; None where a step has no such metric. Of the
    time, the first: training logs a step before it is evaluated."""
    by_step: dict[int, Row] = {}
    names: dict[str, None] = {}  # in the order in which they appear
    for row in rows:
        by_step[row["step"]] = {**row, **by_step.get(row["step"], {})}
        names.update(dict.fromkeys(row))
    return [{name: row.get(name) for name in names} for row in by_step.values()]


def parse_rows(lines: bytes) -> list[Row]:
    """The valid rows among complete lines."""
    try:  # all at once, and with pydantic's parser: three times as fast as json line by line
        rows: list[Any] = from_json(b"[" + lines.rstrip().replace(b"\n", b",") + b"]")
    except ValueError:
        rows = list(_parse_each(lines))
    with suppress(KeyError, TypeError):  # without a loop in Python
        steps = list(map(itemgetter("step"), rows))
        is_good = set(map(type, rows)) <= {dict} and set(map(type, steps)) <= {int}
        if is_good and -MAX_INTEGER < min(steps, default=0) <= max(steps, default=0) < MAX_INTEGER:
            return rows
    return [row for row in rows if _has_step(row)]


def _parse_each(lines: bytes) -> Iterator[Any]:
    for line in lines.split(b"\n"):
        with suppress(ValueError):
            yield from_json(line)


def _has_step(row: Any) -> bool:
    return isinstance(row, dict) and type(row.get("step")) is int and abs(row["step"]) < MAX_INTEGER


def last_rows(path: Path) -> tuple[Row, Row]:
    """The last training row and the last evaluation; empty if they are further from the end than is read. Searches the
    bytes: parsing the rows of thousands of steps between two evaluations would take too long."""
    train: Row = {}
    val: Row = {}
    for count in (_TAIL_BYTES, _SEARCHED_BYTES):
        data, is_whole = _tail(path, count)
        train = train or _last_with(data, b'"train/loss"')
        val = val or _last_with(data, b'"val/loss"')
        if is_whole or (train and val):
            break
    return train, val


def best_val_loss(path: Path, last_evaluation: Row) -> float | None:
    """The loss of the last evaluation that was the best until then; None if it is further from the end than is read.
    `last_evaluation`: the last one, which is often the best."""
    row = last_evaluation
    if row and not row.get("val/is_best"):
        row = _last_with(_tail(path, _SEARCHED_BYTES)[0], b'"val/is_best": 1.0')
    return finite(row.get("val/loss"))


def _tail(path: Path, count: int) -> tuple[bytes, bool]:
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


def _line(row: Row) -> str:
    """NaN and infinity are not JSON: they become null."""
    clean = dict(row)
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            clean[name] = None
    return json.dumps(clean) + "\n"
