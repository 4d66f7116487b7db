"""Logs of pods as they come: each line once and in order, over broken connections, restarts and replaced pods.

The cluster puts a time before each line when it is asked to. That time is where to go on after a connection broke:
`since` counts in whole seconds, so lines come again, and those up to the last time are left out.
"""

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from llmtrain.errors import ClusterError, UsageError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.launch.record import Record
from llmtrain.operate.status.pods import by_index, container_state, current_container

RETRY_SEC = 1.0
LONGEST_RETRY_SEC = 15.0
AWAY_LIMIT_SEC = 600.0  # that a cluster may be silent before we give up following
FAILURES_TOLD = 3  # in a row: an API server that restarts is told elsewhere
DRAIN_SEC = 5.0  # for what was said last and is still on its way
WAIT_FOR_OLDER_SEC = 5.0  # an older pod whose machine is lost must not hold up the one that replaces it


@dataclass(frozen=True)
class LogLine:
    index: int
    """Of the node."""
    time: str
    """When it was written, as the machine of the pod has it."""
    text: str
    pod: str | None = None
    """None: read from the runs volume, where the pods are gone."""
    rank: int | None = None
    """Of the process, where the log is its own."""


def split_time(line: str) -> tuple[str, str]:
    """(time, line). A line that has none keeps its text whole."""
    stamp, space, text = line.partition(" ")
    is_time = len(stamp) >= 20 and stamp[4:5] == "-" and stamp[10:11] == "T"
    return (_sortable(stamp), text) if is_time and (space or not text) else ("", line)


def _sortable(stamp: str) -> str:
    """Times as text in one length, so that they sort: trailing zeros of the fraction are left out by the cluster."""
    whole, _, fraction = stamp.removesuffix("Z").partition(".")
    return f"{whole}.{fraction.ljust(9, '0')}Z"


class PodLogs:
    """Follows the logs of a run's pods, each in a thread. `update` tells it of the pods there are."""

    def __init__(self, cluster: Cluster, record: Record, index: int | None = None, tail: int | None = None) -> None:
        """`index`: of one node only. `tail`: begin so many lines before the end, of the newest pods."""
        self._cluster, self._record, self._index, self._tail = cluster, record, index, tail
        self._lines: queue.Queue[LogLine] = queue.Queue()
        self._threads: dict[str, _PodThread] = {}
        self._passed_over: set[str] = set()
        self._has_more = False
        self._is_closed = threading.Event()

    def update(self, pods: Iterable[Object]) -> None:
        found = {i: own for i, own in by_index(self._record, pods).items() if self._index in (None, i)}
        if self._tail is not None:  # only the end was asked for
            self._passed_over |= {pod["metadata"]["uid"] for own in found.values() for pod in own[:-1]}
        known = self._passed_over.union(self._threads)
        self._has_more = False
        for index, own in found.items():
            for place, pod in enumerate(own):
                if pod["metadata"]["uid"] in known or not _has_started(pod, self._record.workload.container):
                    continue
                if self._may_start(own[:place]):
                    self._start(index, pod)
                else:
                    self._has_more = True
        self._tail = None if self._threads else self._tail  # a pod that comes later is read from its beginning

    def _may_start(self, older: list[Object]) -> bool:
        """After the pods it replaces have been read to their end, or cannot be."""
        threads = [self._threads.get(pod["metadata"]["uid"]) for pod in older]
        return all(
            thread is None or thread.is_done or time.monotonic() - thread.last_line_at > WAIT_FOR_OLDER_SEC
            for thread in threads
        )

    def _start(self, index: int, pod: Object) -> None:
        thread = _PodThread(self._cluster, self._record, index, pod, self._lines, self._is_closed, self._tail)
        self._threads[pod["metadata"]["uid"]] = thread
        thread.start()

    def lines(self, wait_sec: float = 0.0) -> Iterator[LogLine]:
        """Lines that have come; waits so long for the first one."""
        try:
            yield self._lines.get(timeout=wait_sec) if wait_sec else self._lines.get_nowait()
            while True:
                yield self._lines.get_nowait()
        except queue.Empty:
            return

    @property
    def is_drained(self) -> bool:
        """Whether everything that can be read was read and taken."""
        return not self._has_more and self._lines.empty() and all(thread.is_done for thread in self._threads.values())

    @property
    def is_forbidden(self) -> bool:
        """Whether we have no right to what was asked for."""
        return any(thread.is_forbidden for thread in self._threads.values())

    def close(self) -> None:
        """Threads end with the next line they get; they hold up nothing meanwhile."""
        self._is_closed.set()


class _PodThread(threading.Thread):
    """Follows one pod: its container, and those that are started in its place."""

    def __init__(
        self,
        cluster: Cluster,
        record: Record,
        index: int,
        pod: Object,
        lines: "queue.Queue[LogLine]",
        is_closed: threading.Event,
        tail: int | None,
    ) -> None:
        super().__init__(daemon=True, name=f"log of {pod['metadata']['name']}")
        self.is_done = self.is_forbidden = False
        self._pod = pod
        self.last_line_at = time.monotonic()
        self._cluster, self._record, self._index = cluster, record, index
        self._lines, self._is_closed, self._tail = lines, is_closed, tail
        self._last_time, self._count_at_last = "", 0
        self._failures = 0

    def run(self) -> None:
        restarts = self._state()[2]
        if restarts and self._tail is None:
            self._read(previous=True)
        while True:
            state, _, now = self._state()
            if now > restarts:  # what its container said last, while nobody listened
                restarts = now
                self._read(previous=True)
            was_over = "terminated" in state and self._is_over()
            if (self._read() and was_over) or self.is_forbidden or not self._is_still_there():
                break
        self.is_done = True

    def _is_still_there(self) -> bool:
        """Looks again, a little later. A pod of the same name may have taken its place: that one's log is not ours."""
        meta = self._pod["metadata"]
        while not self._is_closed.wait(min(RETRY_SEC * 2 ** max(0, self._failures - 1), LONGEST_RETRY_SEC)):
            with suppress(ClusterError):
                found = self._cluster.get("v1", "Pod", meta["name"], self._record.namespace)
                self._pod = found or self._pod
                return found is not None and found["metadata"]["uid"] == meta["uid"]
        return False

    def _state(self) -> tuple[Object, Object, int]:
        return container_state(self._pod, self._record.workload.container)

    def _is_over(self) -> bool:
        """Whether no container will be started in this pod any more."""
        return (self._pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")

    def _read(self, previous: bool = False) -> bool:
        """All there is, and what comes as long as the connection holds. False where it broke."""
        last, told, again = self._last_time, self._count_at_last, 0
        try:
            for line in self._cluster.log(
                self._pod["metadata"]["name"],
                self._record.namespace,
                current_container(self._pod, self._record.workload.container).get(
                    "name", self._record.workload.container
                ),
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
                again += bool(stamp) and stamp == last  # lines of the very same time: as many as were told already
                if not stamp or stamp > last or (stamp == last and again > told):
                    self._tell(stamp, text)
        except ClusterError as problem:
            self._failures += 1
            if self._failures == FAILURES_TOLD:
                self._tell("", f"[K8S] {problem.what.rstrip('.')}. Trying again.")
            return False
        except UsageError as refused:
            self.is_forbidden = True
            self._tell("", f"[K8S] {refused.what}")
            return True
        return True

    def _tell(self, stamp: str, text: str) -> None:
        if stamp:
            self._count_at_last = self._count_at_last + 1 if stamp == self._last_time else 1
            self._last_time = stamp
        self.last_line_at = time.monotonic()
        self._lines.put(LogLine(self._index, stamp, text, self._pod["metadata"]["name"]))


def _has_started(pod: Object, container: str) -> bool:
    state, last, _ = container_state(pod, container)
    return "running" in state or "terminated" in state or bool(last)
