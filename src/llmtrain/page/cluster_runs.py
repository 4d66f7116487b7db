"""The runs of a namespace, read with the rights of the user, while the page is open."""

import shlex
import shutil
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

from llmtrain.core.redact import redacted_line
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch.record import Record, find_record
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.all_runs import all_status
from llmtrain.operate.status.events import event_time, find_events, is_about
from llmtrain.operate.status.pods import PodStatus
from llmtrain.operate.status.run_status import RunStatus
from llmtrain.operate.why.explain import explain
from llmtrain.page.local_runs import LOCAL, RowTable
from llmtrain.page.mirror import Mirror
from llmtrain.page.pod_log_file import TAIL_LINES, PodLogFile
from llmtrain.page.run_values import Values, run_row, why_values
from llmtrain.page.values import message
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.json_values import epoch, finite
from llmtrain.runs.view import RunView

POLL_SEC = 4.0
IDLE_SEC = 20.0
FIRST_SEC = 4.0
"""How long the first viewer waits for the cluster."""
WHY_SEC = 15.0
MAX_EVENTS = 100
_POD_FIELDS = ("name", "index", "ranks", "phase", "reason", "message", "node", "restarts", "exit_code", "silent_sec")

_FILE_FIELDS = (
    "best_val_loss",
    "seconds",
    "lr",
    "seed",
    "parameters",
    "model",
    "dataset",
    "cost",
    "cost_projected",
    "currency",
    "peak_memory_bytes",
    "predicted_memory_bytes",
    "total_seconds",
    "predicted_seconds",
)
"""Of a row: known from the files of a run only."""


class ClusterRuns:
    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.table = RowTable()
        self.problem: Values | None = None
        self.name = cluster.name
        self.namespace = namespace
        self._cluster = cluster
        self._directory = Path(tempfile.mkdtemp(prefix="llmtrain-page-"))
        self._records: dict[str, Record] = {}
        self._mirrors: dict[str, Mirror] = {}
        self._logs: dict[tuple[str, int], PodLogFile] = {}
        self._viewed: dict[str, float] = {}
        self._details: dict[str, Values] = {}
        self._why: dict[str, tuple[float, Values]] = {}
        self._wanted_at = 0.0
        self._lock = threading.Lock()
        self._has_read = threading.Event()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def refresh(self) -> None:
        """Read the runs every few seconds while this is called. Returns at once, except the first time."""
        self._wanted_at = time.monotonic()
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._poll, daemon=True, name="cluster runs")
                self._thread.start()
        self._has_read.wait(FIRST_SEC)

    def has_copy(self, key: str) -> bool:
        """Whether the files of a run have been read."""
        return key in self._mirrors and time.monotonic() - self._viewed.get(key, 0.0) < IDLE_SEC

    def directory(self, key: str) -> RunDirectory:
        """The copy of the files of a run."""
        mirror = self._mirrors.get(key)
        if mirror is None:
            mirror = self._mirrors[key] = Mirror(self._cluster, self._record(key), self._directory)
        self._viewed[key] = time.monotonic()
        return mirror.want()

    def details(self, key: str) -> Values:
        """Pods, events and commands, as they were read last."""
        self._viewed[key] = time.monotonic()
        record = self._record(key)
        run = f"{record.run_id}{self._cluster.place(record.namespace)}"
        launch = record.config.launch
        commands = [
            {"what": "Resume", "command": f"llmtrain resume {run}"},
            {"what": "Download", "command": f"llmtrain fetch {run}"},
            {"what": "Export, after the download", "command": f"llmtrain export {record.run_id} --to model"},
            {"what": "Explain", "command": f"llmtrain why {run}"},
        ]
        place = record.runs_claim or "no volume"
        logs = list(range(launch.node_range[1] * launch.processes_per_node))
        found = self._details.get(key, {"pods": [], "events": []})
        return {**found, "commands": commands, "logs": logs, "path": f"{record.run_id} on {place}"}

    def why(self, key: str) -> Values:
        """The diagnosis, at most every WHY_SEC: it may take some seconds."""
        at, value = self._why.get(key, (0.0, {}))
        if time.monotonic() - at > WHY_SEC or not value:
            value = why_values(explain(ObservedRun(self._cluster, self._record(key))))
            self._why[key] = (time.monotonic(), value)
        return value

    def log_path(self, key: str, rank: int) -> Path:
        log = self._logs.get((key, rank))
        if log is None or log.is_idle:
            path = self._directory / "logs" / f"{key.replace('/', '_')}-{rank}.log"
            log = self._logs[key, rank] = PodLogFile(self._cluster, self._record(key), rank, path)
        return log.want(FIRST_SEC)

    def log_note(self, key: str, rank: int) -> str | None:
        """What the log of a rank that was read last does not have."""
        log = self._logs.get((key, rank))
        if log is None or not log.is_tail:
            return None
        record = self._record(key)
        command = f"llmtrain logs {record.run_id} --rank {rank}{self._cluster.place(record.namespace)}"
        return f"The last {TAIL_LINES:,} lines of the pod when it was opened, and all since. All lines: {command}"

    def options(self, namespace: str) -> list[str]:
        return shlex.split(self._cluster.place(namespace.removesuffix(".")))

    def close(self) -> None:
        """Delete reader pods and copies."""
        self._is_closed.set()
        for log in self._logs.values():
            log.close()
        for mirror in self._mirrors.values():
            mirror.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _record(self, key: str) -> Record:
        namespace, _, run_id = key.partition("/")
        if key not in self.table:
            raise UsageError(f"Run '{run_id}' is not in namespace {self.namespace}.", remedy="See the list of runs.")
        if key not in self._records:
            self._records[key] = find_record(self._cluster, run_id, namespace.removesuffix("."))
        return self._records[key]

    def _poll(self) -> None:
        while not self._is_closed.is_set() and time.monotonic() - self._wanted_at < IDLE_SEC:
            try:
                self._read()
                self.problem = None
            except LlmtrainError as problem:  # unreachable, or not allowed to list pods
                self.problem = message(problem)
            except Exception as problem:  # an answer that is none of the Kubernetes API
                what = f"Cannot read the runs of namespace {self.namespace}: {redacted_line(repr(problem), 200)}"
                self.problem = {"what": what, "remedy": "Check the cluster with: llmtrain status"}
            self._has_read.set()
            self._is_closed.wait(POLL_SEC)

    def _read(self) -> None:
        statuses = {
            f"{_where(status.namespace)}/{status.run_id}": status
            for status in all_status(self._cluster, self.namespace)
        }
        for key, status in statuses.items():
            self.table.put(key, self._row(key, status))
        self.table.keep(set(statuses))
        for key in self._records.keys() - statuses.keys():  # deleted
            self._records.pop(key, None)
        now = time.monotonic()
        for key, at in list(self._viewed.items()):
            if now - at < IDLE_SEC and key in statuses:
                self._details[key] = self._read_details(key)

    def _read_details(self, key: str) -> Values:
        _, _, run_id = key.partition("/")
        record = self._records[key] = find_record(self._cluster, run_id, self.namespace)  # a resume has changed it
        status = ObservedRun(self._cluster, record, with_log=False, with_usage=False).status
        pods = [_pod_values(pod) for pod in status.pods]
        events = [event for event in find_events(self._cluster, record.namespace) if is_about(record, event)]
        rows = [
            {
                "time": epoch(event_time(event)),
                "about": redacted_line((event.get("involvedObject") or {}).get("name", "")),
                "reason": redacted_line(event.get("reason", "")),
                "message": redacted_line(event.get("message", "")),
                "is_warning": event.get("type") == "Warning",
            }
            for event in sorted(events, key=event_time, reverse=True)[:MAX_EVENTS]
        ]
        rows = [*_lost_nodes(pods), *rows]
        return {"pods": pods, "events": rows}

    def _row(self, key: str, status: RunStatus) -> Values:
        row: Values = {
            "key": key,
            "where": _where(status.namespace),
            "run_id": status.run_id,
            "name": status.run_id,
            "state": status.state,
            "why": status.why_short,
            "step": status.step or 0,
            "max_steps": status.max_steps,
            "loss": finite(status.loss),
            "val_loss": finite(status.val_loss),
            "tokens_per_second": finite(status.tokens_per_second),
            "mfu": None,
            "eta": None,
            "time_left": status.time_left,
            "pods": status.nodes,
            "processes": status.processes_per_node,
            "restarts": status.restarts,
            "gpu_hours": None,
            **dict.fromkeys(_FILE_FIELDS),
            "started": epoch(status.launched_at),
            "updated": None,
        }
        mirror = self._mirrors.get(key)
        if mirror is not None and mirror.run.metrics.exists():
            own = run_row(RunView(mirror.run))
            row |= {name: own[name] for name in (*_FILE_FIELDS, "mfu", "gpu_hours", "updated", "started")}
            row["step"] = max(row["step"], own["step"])
            for name in ("loss", "val_loss", "max_steps"):
                if row[name] is None:
                    row[name] = own[name]
        if mirror is not None and mirror.problem:
            row["problem"] = mirror.problem["what"]
        return row


def _where(namespace: str) -> str:
    """First part of the key of a run: the namespace. One with the name of the directory's runs gets a dot."""
    return f"{namespace}." if namespace == LOCAL else namespace


def _pod_values(pod: PodStatus) -> Values:
    values = asdict(pod)
    return {name: values[name] for name in values if name in _POD_FIELDS}


def _lost_nodes(pods: list[Values]) -> list[Values]:
    """A row per node that is NotReady, since when it is; once, however many pods it has."""
    longest: dict[str, float] = {}
    for pod in pods:
        if pod["silent_sec"] is not None and pod["node"]:
            longest[pod["node"]] = max(pod["silent_sec"], longest.get(pod["node"], 0.0))
    state = {"reason": "NotReady", "message": "The node does not answer.", "is_warning": True, "is_open": True}
    return [{"time": round(time.time() - silent), "about": node, **state} for node, silent in longest.items()]
