"""Watching a run until it ends: a live view in a terminal, plain lines elsewhere. Needs no volume."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TextIO

from llmtrain.errors import ClusterError, UsageError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.launch.plan import config_map_name
from llmtrain.launch.record import Record, read_record
from llmtrain.operate.guard.recover import find_lost, recover
from llmtrain.operate.logs.pod_log import DRAIN_SEC, UNREACHABLE_LIMIT_SEC, PodLogs
from llmtrain.operate.status.display import Display, LiveView, PlainLines
from llmtrain.operate.status.events import find_events
from llmtrain.operate.status.pods import PodStatus, node_index, pod_statuses
from llmtrain.operate.status.progress import RunProgress
from llmtrain.operate.status.run_status import (
    RunStatus,
    find_job,
    find_pods,
    idle_code,
    make_status,
    needs_events,
    objects_of,
)
from llmtrain.operate.status.startup_failures import never_started
from llmtrain.operate.status.state import Observation

POLL_SEC = 1.0
USAGE_SEC = 10.0  # metrics-server measures about every 15 s
EVENTS_SEC = 5.0
START_FAILURE_SEC = 15.0  # a failure must last this long: registries fail briefly, secrets may be created late
REMOVED_SEC = 3.0  # `stop` deletes the job a moment before it updates the record


def follow(
    cluster: Cluster,
    record: Record,
    *,
    is_terminal: bool,
    out: TextIO,
    on_never_started: Callable[[UsageError], None] | None = None,
    tail: int | None = None,
    recover_after: float | None = None,
    until_running: bool = False,
) -> RunStatus:
    """Watch a run until it ends; Ctrl-C is left to the caller. `on_never_started` is called once with the reason why no
    pod can start, and may roll the launch back and raise. `tail`: number of earlier log lines to show. `recover_after`:
    replace pods whose node has been NotReady for this many seconds. `until_running`: return once all pods run."""
    logs = PodLogs(cluster, record, index=0, tail=tail)
    display: Display = LiveView(out) if is_terminal else PlainLines(out)
    try:
        with display, objects_of(cluster, record):
            return _Watcher(cluster, record, logs, display, on_never_started, recover_after, until_running).run()
    finally:
        logs.close()


class _Watcher:
    def __init__(
        self,
        cluster: Cluster,
        record: Record,
        logs: PodLogs,
        display: Display,
        on_never_started: Callable[[UsageError], None] | None,
        recover_after: float | None,
        until_running: bool,
    ) -> None:
        self._cluster, self._record, self._logs, self._display = cluster, record, logs, display
        self._on_never_started, self._recover_after = on_never_started, recover_after
        self._until_running = until_running
        self._progress = RunProgress()
        self._known_pods: dict[str, Object] = {}
        self._present: list[Object] = []
        self._restarts = 0
        self._usage: dict[str, dict[str, dict[str, str]]] | None = None
        self._events: list[Object] = []
        self._next_usage = self._next_events = 0.0
        self._failing_since: float | None = None
        self._removed_since: float | None = None

    def run(self) -> RunStatus:
        reached_at, is_unreachable = time.monotonic(), False
        while True:
            started = time.monotonic()
            try:
                status = self._observe()
                self._check_start(status)
                self._recover(status)
            except ClusterError as problem:
                if time.monotonic() - reached_at > UNREACHABLE_LIMIT_SEC:
                    raise
                if not is_unreachable:
                    self._display.connection(problem)
                is_unreachable = True
            else:
                reached_at = time.monotonic()
                if is_unreachable:
                    self._display.connection(None)
                is_unreachable = False
                if self._is_over(status):
                    return self._finish(status)
                self._display.status(status)
                if self._until_running and status.state == "running":
                    return status
            self._show_log_lines(until=started + POLL_SEC)

    def _observe(self) -> RunStatus:
        now, cluster, record = time.monotonic(), self._cluster, self._record
        job, pods = find_job(cluster, record), find_pods(cluster, record)
        if job is None:
            record = self._record = self._reread_record()
        self._present = pods
        self._logs.update(pods)
        pods = self._with_replaced(pods)
        if now >= self._next_usage:
            self._usage, self._next_usage = cluster.usage(record.namespace, record.selector), now + USAGE_SEC
        statuses = pod_statuses(record, pods, self._usage)
        if not needs_events(record, job, statuses):
            self._events = []
        elif now >= self._next_events:
            self._events, self._next_events = find_events(cluster, record.namespace), now + EVENTS_SEC
        self._notice_restart(statuses)
        idle = idle_code(cluster, record, statuses, self._progress)
        progress = None if self._logs.is_forbidden else self._progress
        return make_status(
            record, Observation(job, statuses, progress, idle, self._events, place=cluster.place(record.namespace))
        )

    def _notice_restart(self, pods: list[PodStatus]) -> None:
        """After a restart rank 0 has not stepped yet. Its log may be ahead of the pod, so `idle_code` is kept."""
        restarts = next((pod.restarts for pod in pods if pod.index == 0), self._restarts)
        if restarts > self._restarts:
            self._progress = replace(self._progress, has_stepped=False, tokens_per_second=None, time_left=None)
        self._restarts = restarts

    def _with_replaced(self, pods: list[Object]) -> list[Object]:
        """The pods, preceded by deleted pods that they replaced, so that restarts are counted."""
        present = {pod["metadata"]["uid"] for pod in pods}
        ranks = {node_index(self._record, pod) for pod in pods}
        replaced = [
            pod
            for uid, pod in self._known_pods.items()
            if uid not in present and node_index(self._record, pod) in ranks
        ]
        self._known_pods |= {pod["metadata"]["uid"]: pod for pod in pods}
        return [*replaced, *pods]

    def _reread_record(self) -> Record:
        """The current record: the run may have been stopped. The old one if it was deleted."""
        found = self._cluster.get("v1", "ConfigMap", config_map_name(self._record.run_id), self._record.namespace)
        return self._record if found is None else read_record(found, self._cluster.place(self._record.namespace))

    def _check_start(self, status: RunStatus) -> None:
        if self._on_never_started is None:
            return
        error = never_started(self._cluster, self._record, status)
        now = time.monotonic()
        if error is None:
            self._failing_since = None
            has_started = sum(pod.has_run for pod in status.pods) >= self._record.config.launch.node_range[0]
            if has_started or status.state in ("running", "restarting"):
                self._on_never_started = None
            return
        self._failing_since = now if self._failing_since is None else self._failing_since
        if now - self._failing_since >= START_FAILURE_SEC:
            callback, self._on_never_started = self._on_never_started, None
            callback(error)

    def _recover(self, status: RunStatus) -> None:
        """Replace pods on lost nodes, unless the run is ending."""
        if self._recover_after is None or status.has_ended or status.state == "stopping":
            return
        lost, _ = find_lost(self._present, self._recover_after)
        try:
            for pod in recover(self._cluster, self._record.namespace, lost):
                self._display.note(f"removed {pod.name}: {pod.text}")
        except UsageError as refused:  # not allowed; keep watching
            self._recover_after = None
            self._display.note(f"pods on lost nodes cannot be removed: {refused.what}")

    def _is_over(self, status: RunStatus) -> bool:
        if status.state not in ("removed", "incomplete"):
            self._removed_since = None
            return status.has_ended
        now = time.monotonic()
        self._removed_since = now if self._removed_since is None else self._removed_since
        return now - self._removed_since >= REMOVED_SEC

    def _finish(self, status: RunStatus) -> RunStatus:
        """Show the remaining log lines of rank 0 and the final status. A waiting StatefulSet pod keeps its log open."""
        deadline = time.monotonic() + DRAIN_SEC
        is_waiting = status.kind == "stateful_set" and status.state in ("finished", "failed")
        while not is_waiting and not self._logs.is_drained and time.monotonic() < deadline:
            self._logs.update(self._present)  # starts pods that waited for an older one
            self._show_log_lines(until=time.monotonic() + 0.2)
        self._show_log_lines(until=0.0)
        status = replace(
            status,
            **{
                name: getattr(self._progress, name)
                for name in ("step", "max_steps", "loss", "val_loss")
                if getattr(self._progress, name) is not None
            },
        )
        self._display.status(status)
        return status

    def _show_log_lines(self, until: float) -> None:
        while True:
            for line in self._logs.lines(wait_sec=max(0.0, until - time.monotonic())):
                self._progress = self._progress.after(line.text)
                self._display.line(line.text)
            if time.monotonic() >= until:
                return
