"""The runs in a directory, read again only where a file has changed."""

import os
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmtrain.config.section import RUN_ID_PATTERN
from llmtrain.core.files import is_there
from llmtrain.errors import UsageError
from llmtrain.page.run_values import Values, run_row
from llmtrain.page.values import message
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.state import RunState
from llmtrain.runs.view import RunView

LOCAL = "local"
"""First part of the key of a run in the directory; of a run on a cluster it is the namespace."""
REFRESH_SEC = 1.5
_RUN_ID = re.compile(RUN_ID_PATTERN)


class RowTable:
    """Rows by key. Each change of a row gets a number, so that a client receives only what is newer than its own."""

    def __init__(self) -> None:
        self.version = 0
        self._rows: dict[str, tuple[int, Values]] = {}
        self._removed: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def get(self, key: str) -> Values | None:
        return self._rows[key][1] if key in self._rows else None

    def put(self, key: str, row: Values) -> None:
        if key not in self._rows or self._rows[key][1] != row:
            self.version += 1
            self._rows[key] = (self.version, row)
            self._removed.pop(key, None)

    def keep(self, keys: set[str]) -> None:
        """Remove all others."""
        for key in self._rows.keys() - keys:
            self.version += 1
            del self._rows[key]
            self._removed[key] = self.version

    def since(self, version: int) -> Values:
        rows = [row for changed, row in self._rows.values() if changed > version]
        return {"rows": rows, "removed": [key for key, at in self._removed.items() if at > version]}


class LocalRuns:
    def __init__(self, root: str) -> None:
        self.root = root
        self.table = RowTable()
        self.problem: Values | None = None
        self._signatures: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._refreshed_at = -REFRESH_SEC

    def find(self, run_id: str) -> RunDirectory | None:
        if not _RUN_ID.fullmatch(run_id):
            return None
        run = RunDirectory(Path(self.root).expanduser() / run_id)
        return run if run.exists() else None

    def refresh(self) -> None:
        """Read what has changed. Several viewers share one reading."""
        with self._lock:
            if time.monotonic() - self._refreshed_at < REFRESH_SEC:
                return
            try:
                names = self._names()
                self.problem = None
            except UsageError as problem:
                self.problem = message(problem)
                names = []
            for name in names:
                self._refresh_run(name)
            self.table.keep({f"{LOCAL}/{name}" for name in names})
            self._refreshed_at = time.monotonic()

    def _names(self) -> list[str]:
        directory = Path(self.root).expanduser()
        try:
            with os.scandir(directory) as entries:
                names = [entry.name for entry in entries if _RUN_ID.fullmatch(entry.name) and _is_directory(entry)]
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(
                f"{directory} does not exist yet.", remedy="Start a run, or pass the directory of all runs with --root."
            ) from None
        except OSError as problem:
            raise UsageError(f"Cannot read {directory}: {problem.strerror or problem}.") from None
        return [name for name in names if name in self._signatures or _is_run(RunDirectory(directory / name))]

    def _refresh_run(self, name: str) -> None:
        run = RunDirectory(Path(self.root).expanduser() / name)
        key = f"{LOCAL}/{name}"
        signature = signature_of((run.metrics, run.generations, run.finished, run.lock, run.exits, run.meta))
        row = self.table.get(key)
        # The lock of a process that was killed stays as it is.
        if row is None or signature != self._signatures.get(name) or row["state"] == RunState.RUNNING:
            self._signatures[name] = signature
            self.table.put(key, {"key": key, "where": LOCAL, **run_row(RunView(run))})


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


def _is_directory(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_run(run: RunDirectory) -> bool:
    return any(is_there(path) for path in (run.meta, run.config, run.checkpoints))
