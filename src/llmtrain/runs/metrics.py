"""metrics.jsonl: one JSON object a line, appended as the run goes; a resumed run drops what it will redo."""

import errno
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmtrain.logs import warn
from llmtrain.runs.atomic import write_atomic

Row = dict[str, Any]


class MetricsLog:
    def __init__(self, path: Path, keep_until_step: int, keep_evaluations_until: int) -> None:
        """Open for appending. What the run will do again is dropped first, and so is a torn last line."""
        if path.exists():
            rows = (row for row in read_metrics(path) if row["step"] <= keep_until_step)
            kept = [row for row in rows if "val/loss" not in row or row["step"] <= keep_evaluations_until]
            write_atomic(path, "".join(_line(row) for row in kept))
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._waiting = b""
        self._said = False

    def append(self, row: Row) -> None:
        """Write a row; when the disk is full it is kept in memory and written with a later one."""
        self._waiting += _line(row).encode()
        self._write()

    def _write(self) -> None:
        if not self._waiting:
            return
        size = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, self._waiting)
            if written < len(self._waiting):
                raise OSError(errno.ENOSPC, "No space left on device")
            self._waiting = b""
        except OSError as problem:
            os.ftruncate(self._descriptor, size)  # whole lines only
            if not self._said:
                warn("TRAIN", f"{self._path} cannot be written ({problem.strerror}); its rows wait in memory")
            self._said = True

    def sync(self) -> None:
        """Called before a checkpoint is published: the rows it counts on are then on disk."""
        self._write()
        os.fsync(self._descriptor)

    def close(self) -> None:
        self._write()
        os.close(self._descriptor)


def read_metrics(path: Path) -> Iterator[Row]:
    """Rows in order. What is no row, such as a last line cut off by a crash, is passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row


def _line(row: Row) -> str:
    """NaN and infinity are not JSON: they become null."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(clean) + "\n"
