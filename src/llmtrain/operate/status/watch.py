"""Watching a run until it ends: a live view in a terminal, plain lines elsewhere. Needs no volume."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TextIO

from llmtrain.errors import ClusterError, UsageError
from llmtrain.kubernetes.client import Object
from llmtrain.operate.logs.pod_log import DRAIN_SEC, UNREACHABLE_LIMIT_SEC, PodLogs
from llmtrain.operate.observed_run import ObservedRun, current_record
from llmtrain.operate.recover import find_lost, recover
from llmtrain.operate.status.display import Display, LiveView, PlainLines
from llmtrain.operate.status.events import find_events
from llmtrain.operate.status.pods import PodStatus, Usage, node_index
from llmtrain.operate.status.progress import RunProgress
from llmtrain.operate.status.queue import NOT_QUEUED
from llmtrain.operate.status.run_status import RunStatus
from llmtrain.operate.status.startup_failures import never_started
from llmtrain.runs.state import RunState

POLL_SEC = 1.0
USAGE_SEC = 10.0  # metrics-server measures about every 15 s
EVENTS_SEC = 5.0
START_FAILURE_SEC = 15.0  # a failure must last this long: registries fail briefly, secrets may be created late
REMOVED_SEC = 3.0  # `stop` deletes the job a moment before it updates the record


def follow(
    run: ObservedRun,
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
    logs = PodLogs(run, index=0, tail=tail)
    display: Display = LiveView(out) if is_terminal else PlainLines(out)
    try:
        with display, run.checked_objects():
            return _Watcher(run, logs, display, on_never_started, recover_after, until_running).run()
    finally:
        logs.close()


class _Watcher:
    def __init__(
        self,
        run: ObservedRun,
        logs: PodLogs,
        display: Display,
        on_never_started: Callable[[UsageError], None] | None,
        recover_after: float | None,
        until_running: bool,
    ) -> None:
        self._cluster = run.cluster
        self._record = run.record
        self._logs = logs
        self._display = display
        self._on_never_started = on_never_started
        self._recover_after = recover_after
        self._until_running = until_running
        self._progress = RunProgress()
        self._known_pods: dict[str, Object] = {}
        self._present: list[Object] = []
        self._restarts = 0
        self._usage: Usage | None = None
        self._events: list[Object] = []
        self._next_usage = 0.0
        self._next_events = 0.0
        self._failing_since: float | None = None
        self._removed_since: float | None = None

    def run(self) -> RunStatus:
        reached_at = time.monotonic()
        is_unreachable = False
        while True:
            started = time.monotonic()
            try:
                run = self._observe()
                status = run.status
                self._check_start(run)
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
                if self._until_running and status.state == RunState.RUNNING:
                    return status
            self._show_log_lines(until=started + POLL_SEC)

    def _observe(self) -> ObservedRun:
        """One look. Parts that change slowly are read less often than the others, and the log is followed anyway."""
        now = time.monotonic()
        run = ObservedRun(self._cluster, self._record)
        if run.job is None:
            self._record = current_record(self._cluster, self._record)  # it may have been stopped
            run.record = self._record
        self._present = run.pods
        self._logs.update(self._present)
        run.pods = self._with_replaced(self._present)
        if now >= self._next_usage:
            self._usage = self._cluster.usage(run.namespace, run.record.selector)
            self._next_usage = now + USAGE_SEC
        run.usage = self._usage
        if not run.needs_events:
            self._events = []
        elif now >= self._next_events:
            self._events = find_events(self._cluster, run.namespace)
            self._next_events = now + EVENTS_SEC
        run.events = self._events
        run.queue = NOT_QUEUED  # listing all Workloads every second would be too much
        self._notice_restart(run.pod_statuses)
        run.progress = self._progress
        _ = run.idle_code  # before the next line: what was logged before reading was forbidden still counts
        if self._logs.is_forbidden:
            run.progress = None
        return run

    def _notice_restart(self, pods: list[PodStatus]) -> None:
        """After a restart rank 0 has not stepped yet. Its log may be ahead of the pod, so `idle_code` is kept."""
        for pod in pods:
            if pod.index == 0:
                if pod.restarts > self._restarts:
                    self._progress = replace(self._progress, has_stepped=False, tokens_per_second=None, time_left=None)
                self._restarts = pod.restarts

    def _with_replaced(self, pods: list[Object]) -> list[Object]:
        """The pods, preceded by deleted pods that they replaced, so that restarts are counted."""
        present = {pod["metadata"]["uid"] for pod in pods}
        ranks = {node_index(self._record, pod) for pod in pods}
        replaced = []
        for uid, pod in self._known_pods.items():
            if uid not in present and node_index(self._record, pod) in ranks:
                replaced.append(pod)
        for pod in pods:
            self._known_pods[pod["metadata"]["uid"]] = pod
        return [*replaced, *pods]

    def _check_start(self, run: ObservedRun) -> None:
        if self._on_never_started is None:
            return
        status = run.status
        error = never_started(run)
        now = time.monotonic()
        if error is None:
            self._failing_since = None
            has_started = sum(pod.has_run for pod in status.pods) >= self._record.config.launch.node_range[0]
            if has_started or status.state in (RunState.RUNNING, RunState.RESTARTING):
                self._on_never_started = None
            return
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since >= START_FAILURE_SEC:
            callback = self._on_never_started
            self._on_never_started = None  # called once
            callback(error)

    def _recover(self, status: RunStatus) -> None:
        """Replace pods on lost nodes, unless the run is ending."""
        if self._recover_after is None or status.has_ended or status.state == RunState.STOPPING:
            return
        lost, _ = find_lost(self._present, self._recover_after)
        try:
            for pod in recover(self._cluster, self._record.namespace, lost):
                self._display.note(f"removed {pod.name}: {pod.text}")
        except UsageError as refused:  # not allowed; keep watching
            self._recover_after = None
            self._display.note(f"pods on lost nodes cannot be removed: {refused.what}")

    def _is_over(self, status: RunStatus) -> bool:
        if status.state not in (RunState.REMOVED, RunState.INCOMPLETE):
            self._removed_since = None
            return status.has_ended
        if self._removed_since is None:
            self._removed_since = time.monotonic()
        return time.monotonic() - self._removed_since >= REMOVED_SEC

    def _finish(self, status: RunStatus) -> RunStatus:
        """Show the remaining log lines of rank 0 and the final status. A pod that idles keeps its log open."""
        deadline = time.monotonic() + DRAIN_SEC
        is_waiting = self._record.kind.pods_idle_at_end and status.state in (RunState.FINISHED, RunState.FAILED)
        while not is_waiting and not self._logs.is_drained and time.monotonic() < deadline:
            self._logs.update(self._present)  # starts pods that waited for an older one
            self._show_log_lines(until=time.monotonic() + 0.2)
        self._show_log_lines(until=0.0)
        for name in ("step", "max_steps", "loss", "val_loss"):
            value = getattr(self._progress, name)
            if value is not None:
                status = replace(status, **{name: value})
        self._display.status(status)
        return status

    def _show_log_lines(self, until: float) -> None:
        while True:
            for line in self._logs.lines(wait_sec=max(0.0, until - time.monotonic())):
                self._progress = self._progress.after(line.text)
                self._display.line(line.text)
            if time.monotonic() >= until:
                return
