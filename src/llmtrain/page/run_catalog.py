"""What all viewers share: the runs, their curves, and what was read of them last."""

import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import UsageError
from llmtrain.page.local_runs import LOCAL, LocalRuns, signature_of
from llmtrain.page.run_values import Values, run_details, scores_of, why
from llmtrain.page.series import MetricsSeries, SeriesCache
from llmtrain.runs.task_scores import score_files
from llmtrain.runs.view import RankView, RunView

if TYPE_CHECKING:
    from llmtrain.page.cluster_runs import ClusterRuns

SPARK_COLUMNS = 40
RANKS_SEC = 1.9
DETAILS_SEC = 0.9
_MAX_SHARED = 100
_MAX_DIGITS = 16
"""Maximum digits of a version that a client sends."""


class NotFound(UsageError):
    """The run, or a file of it, does not exist (any more)."""


class RunCatalog:
    """The runs of the directory and of the cluster. A key is `local/RUN` or `NAMESPACE/RUN`."""

    def __init__(self, root: str, cluster: "ClusterRuns | None" = None) -> None:
        self.local = LocalRuns(root)
        self.cluster = cluster
        self.series = SeriesCache()
        self.id = secrets.token_hex(4)
        """Id of this process: versions of the list are only comparable within it."""
        self.is_closing = False
        """The server ends, and so do all streams."""
        self._sparks: dict[str, tuple[Any, Values]] = {}
        self._scores: dict[str, tuple[Any, list[Values]]] = {}
        self._ranks = Shared(RANKS_SEC)
        self._details = Shared(DETAILS_SEC)

    # The list.

    def version(self) -> str:
        """`<id>.<version of the local rows>.<version of the cluster's rows>`"""
        remote = self.cluster.table.version if self.cluster else 0
        return f"{self.id}.{self.local.table.version}.{remote}"

    def _parse_version(self, text: str) -> tuple[int, int] | None:
        """None if it is not a version of this process."""
        parts = text.split(".")
        if len(parts) != 3 or parts[0] != self.id:
            return None
        if not all(part.isdecimal() and len(part) < _MAX_DIGITS for part in parts[1:]):
            return None
        return int(parts[1]), int(parts[2])

    def list_since(self, version: str) -> Values:
        """Rows that changed since a version, or all of them; and what could not be read."""
        seen = self._parse_version(version)
        local_version, remote_version = seen or (0, 0)
        problems = []
        self.local.refresh()
        changes = self.local.table.since(local_version)
        if self.local.problem:
            problems.append({"where": "local", **self.local.problem})
        if self.cluster:
            self.cluster.refresh()
            remote = self.cluster.table.since(remote_version)
            changes = {name: [*changes[name], *remote[name]] for name in changes}
            if self.cluster.problem:
                problems.append({"where": "cluster", **self.cluster.problem})
        return {"version": self.version(), "is_all": seen is None, **changes, "problems": problems}

    def rows(self) -> list[Values]:
        """All runs, as they are now."""
        rows: list[Values] = []
        for source in (self.local, self.cluster):
            if source:
                source.refresh()
                rows += source.table.since(0)["rows"]
        return rows

    def row(self, key: str) -> Values:
        """The run in the list, as it is now."""
        source = self.local if _is_local(key) else self.cluster
        row = None
        if source:
            source.refresh()
            row = source.table.get(key)
        if row is None:
            raise _not_found(key)
        return row

    def cluster_options(self, namespace: str) -> list[str]:
        """The options that select the namespace and the cluster for a command."""
        return self.cluster.options(namespace) if self.cluster else []

    # The files of a run.

    def has_files(self, key: str) -> bool:
        """Whether the files of a run can be read here. Those of a run on a cluster only while somebody looks at it:
        reading them takes a pod."""
        remote = self._remote(key)
        return remote is None or remote.has_copy(key)

    def view(self, key: str) -> RunView:
        """The run directory, or the copy of the small files of a run on a cluster."""
        remote = self._remote(key)
        if remote:
            return RunView(remote.directory(key))
        run = self.local.find(_run_id(key)) if _is_local(key) else None
        if run is None:
            raise _not_found(key)
        return RunView(run)

    def metrics_path(self, key: str) -> Path:
        return self.view(key).run.metrics

    def metrics(self, key: str) -> MetricsSeries:
        path = self.metrics_path(key)
        try:
            return self.series.get(path)
        except FileNotFoundError:
            return MetricsSeries(path)  # the run has not logged a step yet
        except OSError as problem:
            raise NotFound(f"Cannot read the metrics of this run: {problem.strerror or problem}.") from None

    def spark(self, key: str) -> Values:
        """A small curve of the loss."""
        nothing: Values = {"x": [], "y": []}
        if not self.has_files(key):
            return nothing
        path = self.metrics_path(key)
        signature = signature_of([path])
        if key not in self._sparks or self._sparks[key][0] != signature:  # not read yet, or rows were added
            try:
                series = self.series.get(path)  # kept: it is likely to be opened next
            except OSError:
                return nothing
            curve = series.curve("train/loss", "step", SPARK_COLUMNS)
            self._sparks[key] = (signature, {"x": curve["x"], "y": curve["y"]})
        return self._sparks[key][1]

    def scores(self, key: str) -> list[Values]:
        """Scores on tasks. Their files are only read again when there are others or one has changed."""
        view = self.view(key)
        paths = score_files(view.run)
        signature = paths, signature_of(paths)
        if key not in self._scores or self._scores[key][0] != signature:
            self._scores[key] = signature, scores_of(view)
        return self._scores[key][1]

    def ranks(self, key: str) -> list[RankView]:
        ranks: list[RankView] = self._ranks.get(key, lambda: self.view(key).ranks())
        return ranks

    def details(self, key: str) -> Values:
        """Marks, checkpoints, starts, commands, pods and events."""

        def read() -> Values:
            value = run_details(self.view(key))
            remote = self._remote(key)
            if remote:
                value |= remote.details(key)
            return value

        details: Values = self._details.get(key, read)
        return details

    def why(self, key: str) -> Values | None:
        remote = self._remote(key)
        return remote.why(key) if remote else why(self.view(key))

    def log_path(self, key: str, rank: int) -> Path:
        remote = self._remote(key)
        if remote:
            return remote.log_path(key, rank)
        path = self.view(key).log_path(rank)
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
        return None if _is_local(key) else self.cluster


def _is_local(key: str) -> bool:
    return key.partition("/")[0] == LOCAL


def _run_id(key: str) -> str:
    return key.partition("/")[2]


def _not_found(key: str) -> NotFound:
    return NotFound(f"Run '{_run_id(key)}' is not here any more.", remedy="See the list of runs.")


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
                if len(self._locks) > _MAX_SHARED:  # keys come from clients: do not keep them all
                    self._values.clear()
                    self._locks.clear()
                self._values[key] = (time.monotonic(), value)
            return value
