"""metrics.jsonl: one JSON object a line, appended as the run goes; a resumed run drops what it will redo."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from llmtrain.runs.atomic import write_atomic

Row = dict[str, Any]


class MetricsLog:
    def __init__(self, path: Path, keep_until_step: int) -> None:
        """Open for appending; rows after `keep_until_step`, and a torn last line, are dropped first."""
        if path.exists():
            kept = [row for row in read_metrics(path) if row["step"] <= keep_until_step]
            write_atomic(path, "".join(_line(row) for row in kept))
        self._file: TextIO = path.open("a", encoding="utf-8")

    def append(self, row: Row) -> None:
        self._file.write(_line(row))
        self._file.flush()

    def sync(self) -> None:
        """Called before a checkpoint is published: the rows it counts on are then on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


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
