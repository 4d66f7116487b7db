"""Watching a run to its end: a live view in a terminal, plain lines anywhere else. No volume is needed to watch."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TextIO

from llmtrain.errors import ClusterError, UsageError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.launch.plan import config_map_name
from llmtrain.launch.record import Record, read_record
from llmtrain.operate.guard.recover import find_lost, recover
from llmtrain.operate.logs.pod_log import AWAY_LIMIT_SEC, DRAIN_SEC, PodLogs
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
    objects_of,
    wants_events,
)
from llmtrain.operate.status.startup_failures import never_started as never_started
from llmtrain.operate.status.state import Seen

POLL_SEC = 1.0
USAGE_SEC = 10.0  # metrics are measured about every 15 s
EVENTS_SEC = 5.0
SURE_SEC = 15.0  # a registry may fail once, a secret may be made a moment later: a launch is given up after that
GONE_SEC = 3.0  # a job that is gone: whoever stops it writes that down a moment later


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
    """Watch a run until it has ended; Ctrl-C is left to the caller. `on_never_started` is told, once, why no pod can
    start (it may take the launch back and raise). `tail`: begin so many lines before the end of the log.
    `recover_after`: give up pods whose machine has not answered for so many seconds. `until_running`: no longer than
    until all pods run."""
    logs = PodLogs(cluster, record, index=0, tail=tail)
    display: Display = LiveView(out) if is_terminal else PlainLines(out)
    try:
        with display, objects_of(cluster, record):
            return _Follower(cluster, record, logs, display, on_never_started, recover_after, until_running).run()
    finally:
        logs.close()


class _Follower:
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
        self._seen: dict[str, Object] = {}
        self._present: list[Object] = []
        self._starts = 0
        self._usage: dict[str, dict[str, dict[str, str]]] | None = None
        self._events: list[Object] = []
        self._next_usage = self._next_events = 0.0
        self._trouble_since: float | None = None
        self._gone_since: float | None = None

    def run(self) -> RunStatus:
        answered_at, is_away = time.monotonic(), False
        while True:
            started = time.monotonic()
            try:
                status = self._look()
                self._check_trouble(status)
                self._recover(status)
            except ClusterError as problem:
                if time.monotonic() - answered_at > AWAY_LIMIT_SEC:
                    raise
                if not is_away:
                    self._display.away(problem)
                is_away = True
            else:
                answered_at = time.monotonic()
                if is_away:
                    self._display.away(None)
                is_away = False
                if self._is_over(status):
                    return self._finish(status)
                self._display.status(status)
                if self._until_running and status.state == "running":
                    return status
            self._take_lines(until=started + POLL_SEC)

    def _look(self) -> RunStatus:
        now, cluster, record = time.monotonic(), self._cluster, self._record
        job, pods = find_job(cluster, record), find_pods(cluster, record)
        if job is None:
            record = self._record = self._read_record_again()
        self._present = pods
        self._logs.update(pods)
        pods = self._with_replaced(pods)
        if now >= self._next_usage:
            self._usage, self._next_usage = cluster.usage(record.namespace, record.selector), now + USAGE_SEC
        statuses = pod_statuses(record, pods, self._usage)
        if not wants_events(record, job, statuses):
            self._events = []
        elif now >= self._next_events:
            self._events, self._next_events = find_events(cluster, record.namespace), now + EVENTS_SEC
        self._notice_restart(statuses)
        idle = idle_code(cluster, record, statuses, self._progress)
        progress = None if self._logs.is_forbidden else self._progress
        return make_status(
            record, Seen(job, statuses, progress, idle, self._events, place=cluster.place(record.namespace))
        )

    def _notice_restart(self, pods: list[PodStatus]) -> None:
        """Rank 0 that was started again has not stepped yet, whatever it said before. (Its log may be ahead of this:
        that it waits to be removed is not forgotten, but looked up.)"""
        starts = next((pod.restarts for pod in pods if pod.index == 0), self._starts)
        if starts > self._starts:
            self._progress = replace(self._progress, has_stepped=False, tokens_per_second=None, time_left=None)
        self._starts = starts

    def _with_replaced(self, pods: list[Object]) -> list[Object]:
        """And those we saw whose place was taken: pods that are deleted leave nothing behind to count restarts by."""
        present = {pod["metadata"]["uid"] for pod in pods}
        nodes = {node_index(self._record, pod) for pod in pods}
        gone = [pod for uid, pod in self._seen.items() if uid not in present and node_index(self._record, pod) in nodes]
        self._seen |= {pod["metadata"]["uid"]: pod for pod in pods}
        return [*gone, *pods]

    def _read_record_again(self) -> Record:
        """Somebody may have stopped the run. A record that is gone: deleted."""
        found = self._cluster.get("v1", "ConfigMap", config_map_name(self._record.run_id), self._record.namespace)
        return self._record if found is None else read_record(found, self._cluster.place(self._record.namespace))

    def _check_trouble(self, status: RunStatus) -> None:
        if self._on_never_started is None:
            return
        error = never_started(self._cluster, self._record, status)
        now = time.monotonic()
        if error is None:
            self._trouble_since = None
            has_begun = sum(pod.has_run for pod in status.pods) >= self._record.config.launch.node_range[0]
            if has_begun or status.state in ("running", "restarting"):
                self._on_never_started = None
            return
        self._trouble_since = now if self._trouble_since is None else self._trouble_since
        if now - self._trouble_since >= SURE_SEC:
            tell, self._on_never_started = self._on_never_started, None
            tell(error)

    def _recover(self, status: RunStatus) -> None:
        """Of a run that goes on: one that is being stopped needs nobody in the place of a lost pod."""
        if self._recover_after is None or status.has_ended or status.state == "stopping":
            return
        lost, _ = find_lost(self._present, self._recover_after)
        try:
            for pod in recover(self._cluster, self._record.namespace, lost):
                self._display.note(f"{pod.name} is given up: {pod.text}")
        except UsageError as refused:  # no right to it; watching goes on
            self._recover_after = None
            self._display.note(f"Pods of lost machines are not given up: {refused.what}")

    def _is_over(self, status: RunStatus) -> bool:
        if status.state not in ("removed", "incomplete"):
            self._gone_since = None
            return status.has_ended
        now = time.monotonic()
        self._gone_since = now if self._gone_since is None else self._gone_since
        return now - self._gone_since >= GONE_SEC

    def _finish(self, status: RunStatus) -> RunStatus:
        """What rank 0 said last may still be on its way. A pod that waits to be removed has no last line."""
        deadline = time.monotonic() + DRAIN_SEC
        is_waiting = status.kind == "stateful_set" and status.state in ("finished", "failed")
        while not is_waiting and not self._logs.is_drained and time.monotonic() < deadline:
            self._logs.update(self._present)  # one that waited for an older one
            self._take_lines(until=time.monotonic() + 0.2)
        self._take_lines(until=0.0)
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

    def _take_lines(self, until: float) -> None:
        while True:
            for line in self._logs.lines(wait_sec=max(0.0, until - time.monotonic())):
                self._progress = self._progress.after(line.text)
                self._display.line(line.text)
            if time.monotonic() >= until:
                return
