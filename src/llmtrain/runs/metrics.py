"""metrics.jsonl: one JSON object a line, appended as the run goes; a resumed run drops what it will redo."""

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

Row = dict[str, Any]
SYNC_BYTES = 1 << 20
"""So many may wait for the next checkpoint: they are kept in memory until then."""
CLOSE_SEC = 1.0


class MetricsLog:
    """Rows are kept in memory until they are known to be on disk. After a failed write or fsync they are written again,
    to the same place in the file: none is lost, none is there twice."""

    def __init__(self, path: Path, keep_until_step: int, keep_evaluations_until: int) -> None:
        """Open for appending. What the run will do again is dropped first, and so is a torn last line."""
        if path.exists():
            rows = (row for row in read_metrics(path) if row["step"] <= keep_until_step)
            kept = [row for row in rows if "val/loss" not in row or row["step"] <= keep_evaluations_until]
            write_atomic(path, "".join(_line(row) for row in kept))
        self._path = path
        # Not O_APPEND: rows may have to be written over themselves.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._synced = os.fstat(self._descriptor).st_size
        self._rows = b""
        """What comes after the bytes that are known to be on disk."""
        self._written = 0
        """How many bytes of them are in the file."""
        self._said = False

    def append(self, row: Row) -> None:
        """Write a row; when that fails it is written with a later one."""
        self._rows += _line(row).encode()
        try:
            self._write()
        except OSError as problem:
            self._say(problem)
        if len(self._rows) > SYNC_BYTES:
            self.sync()

    def sync(self) -> bool:
        """Whether every row is on disk now. Called before a checkpoint is published, which counts on them."""
        for _ in range(2):  # a hiccup of the storage is over at once, or lasts
            try:
                self._write()
                os.fsync(self._descriptor)
            except OSError as problem:
                self._written = 0  # the system may have dropped what it could not put on disk: write it again
                self._say(problem)
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
                warn("TRAIN", f"{count} rows of {self._path} could not be written")
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
                os.ftruncate(self._descriptor, end)  # whole lines only
            raise
        self._written = len(self._rows)

    def _say(self, problem: OSError) -> None:
        if not self._said:
            warn("TRAIN", f"{self._path} cannot be written ({problem.strerror}); its rows wait in memory")
        self._said = True


def read_metrics(path: Path) -> Iterator[Row]:
    """Rows in order. What is no row, such as a last line cut off by a crash, is passed over."""
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
