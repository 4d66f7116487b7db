"""What all viewers share: the runs, their curves, and what was read of them last."""

import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import UsageError
from llmtrain.page import collect
from llmtrain.page.collect import Values
from llmtrain.page.local_runs import LOCAL, LocalRuns
from llmtrain.page.run_files import log_path, signature_of
from llmtrain.page.series import MetricsSeries, SeriesCache
from llmtrain.runs.directory import RunDirectory

if TYPE_CHECKING:
    from llmtrain.page.cluster_runs import ClusterRuns

SPARK_COLUMNS = 40
RANKS_SEC = 1.9


class NotFound(UsageError):
    """The run, or a file of it, does not exist (any more)."""


class Hub:
    def __init__(self, root: str, cluster: "ClusterRuns | None" = None) -> None:
        self.local = LocalRuns(root)
        self.cluster = cluster
        self.series = SeriesCache()
        self.id = secrets.token_hex(4)
        """Of this process: versions of the list are only comparable within it."""
        self.is_closing = False
        """The server ends, and so do all streams."""
        self._sparks: dict[str, tuple[Any, Values]] = {}
        self._ranks = Shared(RANKS_SEC)
        self._details = Shared(0.9)

    def version(self) -> str:
        return f"{self.id}.{self.local.table.version}.{self.cluster.table.version if self.cluster else 0}"

    def list_since(self, version: str) -> Values:
        """Rows that changed since a version, or all of them; and what could not be read."""
        self.local.refresh()
        seen = version.split(".")
        is_known = len(seen) == 3 and seen[0] == self.id and all(n.isdecimal() and len(n) < 16 for n in seen[1:])
        local, remote = (int(seen[1]), int(seen[2])) if is_known else (0, 0)
        changes = self.local.table.since(local)
        problems = [{"where": "local", **self.local.problem}] if self.local.problem else []
        if self.cluster:
            self.cluster.refresh()
            more = self.cluster.table.since(remote)
            changes = {name: [*changes[name], *more[name]] for name in changes}
            problems += [{"where": "cluster", **self.cluster.problem}] if self.cluster.problem else []
        return {"version": self.version(), "is_all": not is_known, **changes, "problems": problems}

    def row(self, key: str) -> Values:
        """The run in the list, as it is now."""
        where, _, run_id = key.partition("/")
        table = self.local.table if where == LOCAL else self.cluster.table if self.cluster else None
        (self.local if where == LOCAL or not self.cluster else self.cluster).refresh()
        row = table.get(key) if table else None
        if row is None:
            raise NotFound(f"Run '{run_id}' is not here any more.", remedy="See the list of runs.")
        return row

    def cluster_options(self, namespace: str) -> list[str]:
        """The options that select the namespace and the cluster for a command."""
        return self.cluster.options(namespace) if self.cluster else []

    def directory(self, key: str) -> RunDirectory:
        """The files of a run: its directory, or the copy of the small files of a run on a cluster."""
        where, _, run_id = key.partition("/")
        found = self.local.find(run_id) if where == LOCAL else self.cluster and self.cluster.directory(key)
        if not found:
            raise NotFound(f"Run '{run_id}' is not here any more.", remedy="See the list of runs.")
        return found

    def metrics(self, key: str) -> MetricsSeries:
        path = self.directory(key).metrics
        try:
            return self.series.get(path)
        except FileNotFoundError:
            return MetricsSeries(path)  # the run has not logged a step yet
        except OSError as problem:
            raise NotFound(f"Cannot read the metrics of this run: {problem.strerror or problem}.") from None

    def spark(self, key: str) -> Values:
        """A small curve of the loss. Of a run on a cluster only if somebody has looked at it: reading its files takes a
        pod."""
        if (remote := self._remote(key)) and not remote.has_copy(key):
            return {"x": [], "y": []}
        path = self.directory(key).metrics
        signature = signature_of([path])
        if key not in self._sparks or self._sparks[key][0] != signature:
            try:
                series = self.series.get(path)  # kept: it is likely to be opened next
            except OSError:
                return {"x": [], "y": []}
            curve = series.curve("train/loss", "step", SPARK_COLUMNS)
            self._sparks[key] = (signature, {"x": curve["x"], "y": curve["y"]})
        return self._sparks[key][1]

    def ranks(self, key: str) -> list[Values]:
        rows: list[Values] = self._ranks.get(key, lambda: collect.ranks(self.directory(key)))
        return rows

    def details(self, key: str) -> Values:
        """Marks, checkpoints, starts, commands, pods and events."""

        def read() -> Values:
            run = self.directory(key)
            value = collect.run_details(run)
            if remote := self._remote(key):
                value |= remote.details(key)
            return value

        details: Values = self._details.get(key, read)
        return details

    def why(self, key: str) -> Values | None:
        if remote := self._remote(key):
            return remote.why(key)
        return collect.why(self.directory(key))

    def log_path(self, key: str, rank: int) -> Path:
        if remote := self._remote(key):
            return remote.log_path(key, rank)
        path = log_path(self.directory(key), rank)
        if path is None:
            raise NotFound(
                f"Rank {rank} of this run has no log file.", remedy="Set logging.log_to_file to keep the logs of a run."
            )
        return path

    def log_note(self, key: str, rank: int) -> str | None:
        """What the log lacks; None if it is whole."""
        remote = self._remote(key)
        return remote.log_note(key, rank) if remote else None

    def _remote(self, key: str) -> "ClusterRuns | None":
        """Where a run on a cluster is read; None for one in the directory."""
        return None if key.startswith(f"{LOCAL}/") else self.cluster


class Shared:
    """Values that several viewers need at about the same time are read once."""

    def __init__(self, keep_sec: float) -> None:
        self._keep_sec = keep_sec
        self._values: dict[str, tuple[float, Any]] = {}
        self._locks: dict[str, threading.Lock] = {}
        """One per key: a cluster that does not answer delays only its own runs."""

    def get(self, key: str, read: Callable[[], Any]) -> Any:
        with self._locks.setdefault(key, threading.Lock()):
            at, value = self._values.get(key, (-1e9, None))
            if time.monotonic() - at > self._keep_sec:
                value = read()
                if len(self._locks) > 100:
                    self._values.clear()
                    self._locks.clear()
                self._values[key] = (time.monotonic(), value)
            return value
