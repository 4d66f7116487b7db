"""metrics.jsonl: one JSON object per line, appended during training. A resumed run drops rows of steps it will redo."""

import errno
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmtrain.files import open_text, write_atomic
from llmtrain.logs import warn
from llmtrain.text import plural

Row = dict[str, Any]
SYNC_BYTES = 1 << 20
"""Unsynced rows are kept in memory until the next checkpoint, up to this size."""
CLOSE_SEC = 1.0


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
                self._rows, self._written = b"", 0
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


def _line(row: Row) -> str:
    """NaN and infinity are not JSON: they become null."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(clean) + "\n"
