"""Following pod logs: each line once and in order, across broken connections, restarts and replaced pods.

Lines are requested with timestamps, which is where reading resumes after a broken connection. `sinceSeconds` has a
resolution of one second, so some lines are received twice; those up to the last timestamp are skipped.
"""

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from llmtrain.errors import ClusterError, UsageError
from llmtrain.kubernetes.client import Object
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.pods import by_index, container_state, current_container

RETRY_SEC = 1.0
MAX_RETRY_SEC = 15.0
UNREACHABLE_LIMIT_SEC = 600.0  # following ends if the cluster is unreachable for longer
REPORTED_FAILURES = 3  # consecutive failures before one is reported: a restarting API server is reported elsewhere
DRAIN_SEC = 5.0  # time for the last lines to arrive
WAIT_FOR_OLDER_SEC = 5.0  # an older pod on a lost node must not delay its replacement


@dataclass(frozen=True)
class LogLine:
    index: int
    """Node rank."""
    time: str
    """When it was written, by the clock of the pod's node."""
    text: str
    pod: str | None = None
    """None if the line was read from the runs volume."""
    rank: int | None = None
    """Rank of the process, if it has its own log file."""


def split_time(line: str) -> tuple[str, str]:
    """(timestamp, rest of the line). A line without timestamp is returned whole."""
    stamp, _, text = line.partition(" ")
    is_time = len(stamp) >= 20 and stamp[4:5] == "-" and stamp[10:11] == "T"
    if not is_time:
        return "", line
    return _sortable(stamp), text


def _sortable(stamp: str) -> str:
    """The timestamp padded to nine decimals so that it sorts as text: Kubernetes omits trailing zeros."""
    whole, _, fraction = stamp.removesuffix("Z").partition(".")
    return f"{whole}.{fraction.ljust(9, '0')}Z"


class PodLogs:
    """Follows the logs of a run's pods, one thread per pod. `update` sets the current pods."""

    def __init__(self, run: ObservedRun, index: int | None = None, tail: int | None = None) -> None:
        """`index`: only the pod with this node rank. `tail`: start this many lines before the end, newest pods only."""
        self._run = run
        self._index = index
        self._tail = tail
        self._lines: queue.Queue[LogLine] = queue.Queue()
        self._threads: dict[str, _PodThread] = {}
        self._skipped: set[str] = set()
        self._has_more = False
        self._is_closed = threading.Event()

    def update(self, pods: Iterable[Object]) -> None:
        self._has_more = False
        for index, own in by_index(self._run.record, pods).items():
            if self._index in (None, index):
                self._update_index(index, own)
        if self._threads:
            self._tail = None  # later pods are read from the beginning

    def _update_index(self, index: int, own: list[Object]) -> None:
        """Start to follow the pods of one node rank, oldest first."""
        if self._tail is not None:  # replaced pods are not shown
            self._skipped |= {pod["metadata"]["uid"] for pod in own[:-1]}
        for position, pod in enumerate(own):
            uid = pod["metadata"]["uid"]
            is_known = uid in self._skipped or uid in self._threads
            if is_known or not _has_started(pod, self._run.record.kind.container):
                continue
            if self._can_start(own[:position]):
                self._start(index, pod)
            else:
                self._has_more = True

    def _can_start(self, older: list[Object]) -> bool:
        """Whether the pods it replaces have been read completely, or cannot be."""
        for pod in older:
            thread = self._threads.get(pod["metadata"]["uid"])
            if thread is None or thread.is_done:
                continue
            if time.monotonic() - thread.last_line_at <= WAIT_FOR_OLDER_SEC:
                return False
        return True

    def _start(self, index: int, pod: Object) -> None:
        thread = _PodThread(self._run, index, pod, self._lines, self._is_closed, self._tail)
        self._threads[pod["metadata"]["uid"]] = thread
        thread.start()

    def lines(self, wait_sec: float = 0.0) -> Iterator[LogLine]:
        """Lines received so far; waits up to `wait_sec` for the first one."""
        try:
            yield self._lines.get(timeout=wait_sec) if wait_sec else self._lines.get_nowait()
            while True:
                yield self._lines.get_nowait()
        except queue.Empty:
            return

    @property
    def is_drained(self) -> bool:
        """Whether all available lines have been read and consumed."""
        if self._has_more or not self._lines.empty():
            return False
        return all(thread.is_done for thread in self._threads.values())

    @property
    def is_forbidden(self) -> bool:
        """Whether reading a log was refused (RBAC)."""
        return any(thread.is_forbidden for thread in self._threads.values())

    def close(self) -> None:
        """Ask the threads to end. Each ends with its next line; as daemons they do not block the exit."""
        self._is_closed.set()


class _PodThread(threading.Thread):
    """Follows the log of one pod across restarts of its container."""

    def __init__(
        self,
        run: ObservedRun,
        index: int,
        pod: Object,
        lines: "queue.Queue[LogLine]",
        is_closed: threading.Event,
        tail: int | None,
    ) -> None:
        super().__init__(daemon=True, name=f"log of {pod['metadata']['name']}")
        self.is_done = False
        self.is_forbidden = False
        self._pod = pod
        self.last_line_at = time.monotonic()
        self._cluster = run.cluster
        self._record = run.record
        self._index = index
        self._lines = lines
        self._is_closed = is_closed
        self._tail = tail
        self._last_time = ""
        self._count_at_last = 0
        """Lines received with the last timestamp."""
        self._failures = 0

    def run(self) -> None:
        restarts = self._state()[2]
        if restarts and self._tail is None:
            self._read(previous=True)
        while True:
            state, _, now = self._state()
            if now > restarts:  # the last lines of the previous container
                restarts = now
                self._read(previous=True)
            has_ended = "terminated" in state and self._has_ended()
            if (self._read() and has_ended) or self.is_forbidden or not self._refresh():
                break
        self.is_done = True

    def _refresh(self) -> bool:
        """Wait, then read the pod again. False if it is gone or another pod has its name."""
        meta = self._pod["metadata"]
        wait_sec = min(RETRY_SEC * 2 ** max(0, self._failures - 1), MAX_RETRY_SEC)
        while not self._is_closed.wait(wait_sec):
            with suppress(ClusterError):
                pod = self._cluster.get("v1", "Pod", meta["name"], self._record.namespace)
                self._pod = pod or self._pod
                return pod is not None and pod["metadata"]["uid"] == meta["uid"]
        return False

    def _state(self) -> tuple[Object, Object, int]:
        return container_state(self._pod, self._record.kind.container)

    def _has_ended(self) -> bool:
        """Whether no more containers will start in this pod."""
        return (self._pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")

    def _read(self, previous: bool = False) -> bool:
        """Read the log, following it unless `previous`. False if the connection broke."""
        last = self._last_time
        known = self._count_at_last
        repeated = 0
        container = self._record.kind.container
        try:
            for line in self._cluster.log(
                self._pod["metadata"]["name"],
                self._record.namespace,
                current_container(self._pod, container).get("name", container),
                tail=None if last else self._tail,
                previous=previous,
                follow=not previous,
                since=last or None,
                timestamps=True,
            ):
                if self._is_closed.is_set():
                    return True
                self._failures = 0
                stamp, text = split_time(line)
                # Of lines with the last timestamp, skip as many as were received before.
                repeated += bool(stamp) and stamp == last
                if not stamp or stamp > last or (stamp == last and repeated > known):
                    self._put(stamp, text)
        except ClusterError as problem:
            self._failures += 1
            if self._failures == REPORTED_FAILURES:
                self._put("", f"[K8S] {problem.what.rstrip('.')}. Retrying.")
            return False
        except UsageError as refused:
            self.is_forbidden = True
            self._put("", f"[K8S] {refused.what}")
            return True
        return True

    def _put(self, stamp: str, text: str) -> None:
        if stamp and stamp == self._last_time:
            self._count_at_last += 1
        elif stamp:
            self._count_at_last = 1
            self._last_time = stamp
        self.last_line_at = time.monotonic()
        self._lines.put(LogLine(self._index, stamp, text, self._pod["metadata"]["name"]))


def _has_started(pod: Object, container: str) -> bool:
    state, last, _ = container_state(pod, container)
    return "running" in state or "terminated" in state or bool(last)
