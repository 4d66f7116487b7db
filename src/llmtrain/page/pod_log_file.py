"""The log of a pod in a local file, followed while it is on screen. If the pods are gone, it comes from the runs
volume, as `llmtrain logs` does."""

import threading
import time
from collections.abc import Iterable
from pathlib import Path

from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch.record import Record
from llmtrain.operate.logs.merged_logs import merged_logs, node_rank_of
from llmtrain.operate.logs.pod_log import LogLine, PodLogs
from llmtrain.operate.observed_run import ObservedRun

TAIL_LINES = 5000
POLL_SEC = 3.0
IDLE_SEC = 45.0


class PodLogFile:
    def __init__(self, cluster: Cluster, record: Record, rank: int, path: Path) -> None:
        self.path = path
        self.problem: LlmtrainError | None = None
        self.is_tail = False
        """Whether the file lacks what the pod had written before its last TAIL_LINES."""
        self._cluster = cluster
        self._record = record
        self._rank = rank
        self._index = node_rank_of(record, rank)
        self._wanted_at = 0.0
        self._is_closed = threading.Event()
        self._has_lines = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def want(self, wait_sec: float) -> Path:
        """The file; waits for its first lines. Raises the error if the log cannot be read."""
        self._wanted_at = time.monotonic()
        with self._lock:
            if self._thread is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_bytes(b"")
                self._thread = threading.Thread(target=self._read, daemon=True, name=f"log of rank {self._rank}")
                self._thread.start()
        self._has_lines.wait(wait_sec)
        if self.problem is not None and not self.path.stat().st_size:
            raise self.problem
        return self.path

    @property
    def is_idle(self) -> bool:
        return time.monotonic() - self._wanted_at > IDLE_SEC

    def close(self) -> None:
        self._is_closed.set()

    def _read(self) -> None:
        try:
            if self._pods():
                self.is_tail = True
                self._follow()
            else:
                self._append(merged_logs(ObservedRun(self._cluster, self._record), rank=self._rank))
        except LlmtrainError as problem:
            self.problem = problem
        except OSError as problem:  # of the local file
            self.problem = UsageError(f"Cannot write the copy of the log: {problem.strerror or problem}.")
        self._has_lines.set()

    def _pods(self) -> list[dict[str, object]]:
        pods = ObservedRun(self._cluster, self._record).pods_by_index
        return pods.get(self._index or 0, [])

    def _follow(self) -> None:
        logs = PodLogs(ObservedRun(self._cluster, self._record), self._index, TAIL_LINES)
        try:
            while not self._is_closed.is_set() and not self.is_idle:
                try:
                    logs.update(self._pods())
                    self.problem = None
                except ClusterError as problem:  # may be temporary
                    self.problem = problem
                deadline = time.monotonic() + POLL_SEC
                while (remaining := deadline - time.monotonic()) > 0 and not self._is_closed.is_set():
                    self._append(logs.lines(wait_sec=min(0.5, remaining)))
                    self._has_lines.set()
        finally:
            logs.close()

    def _append(self, lines: Iterable[LogLine]) -> None:
        with self.path.open("ab") as file:
            for line in lines:
                text = line.text
                if line.pod and line.time:
                    stamp = line.time[:19].replace("T", " ")
                    text = f"{stamp} {text}"
                file.write(f"{text}\n".encode("utf-8", "replace"))
