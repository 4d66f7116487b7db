"""The guard, which runs inside the cluster: it replaces pods on lost nodes and notifies a webhook when a run finishes,
fails or is recovered.

It may read pods only, not logs, jobs, nodes or volumes, so that little is gained by compromising it. Sent
notifications are recorded as annotations on the pods, so a restarted guard does not send them again.
"""

import json
import os
import re
import signal
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from http.client import HTTPException
from itertools import zip_longest
from pathlib import Path
from typing import Any

from llmtrain.core.env import EXIT_CODES
from llmtrain.core.interrupts import stop_signals
from llmtrain.core.logs import log, warn
from llmtrain.distributed.platform_codes import FINAL_CODES
from llmtrain.distributed.worker_exit import NO_RESTART_CODES
from llmtrain.errors import LlmtrainError
from llmtrain.guard.manifests import WATCHING
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.kubernetes.labels import APP_LABEL, NOTIFIED, run_id_of
from llmtrain.kubernetes.server_clock import server_now
from llmtrain.launch.kinds.base import all_kinds
from llmtrain.operate.recover import find_lost, recover
from llmtrain.operate.status.lost_nodes import node_not_ready_condition
from llmtrain.operate.status.pods import worst_code
from llmtrain.runs.state import RunState

# A Job waits at most six minutes between retries: a run whose pods have all failed for longer is over.
NO_RETRY_AFTER_SEC = 420.0
POLL_SEC = 5.0
POST_TIMEOUT_SEC = 10.0
MAX_PENDING = 1000  # notifications kept while the webhook is unavailable
_RANGE = re.compile(r"\d+:\d+")  # of the number of nodes


@dataclass(frozen=True)
class RunOutcome:
    """How a whole run ended. How one of its processes ended is an ExitReport or a ContainerExit."""

    event: RunState
    """FINISHED or FAILED."""
    exit_code: int | None
    """Exit code of the pod that decided it; None if no container ran."""


@dataclass(frozen=True)
class Notification:
    event: dict[str, Any]
    on_sent: Callable[[], None]


class Guard:
    def __init__(self, cluster: Cluster, namespace: str, after_sec: float, webhook: str | None = None) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._after_sec = after_sec
        self._webhook = webhook
        self._pending: list[Notification] = []
        self._has_warned_webhook = False
        self._has_warned_annotation = False
        self._notified: set[str] = set()
        """Uids of pods, in case their annotation cannot be written."""

    def check(self) -> None:
        """Check all runs of the namespace once."""
        problems: list[LlmtrainError] = []
        for run, pods in self._runs().items():
            try:
                self._check_run(run, pods)
            except LlmtrainError as problem:  # the other runs are still checked
                problems.append(problem)
        self._send()
        if problems:
            raise problems[0]

    def _check_run(self, run: str, pods: list[Object]) -> None:
        self._recover(run, pods)
        outcome = find_outcome(pods)
        if outcome is None or self._is_reported(run, pods):
            return
        text = f"run {run} has {outcome.event}"
        if outcome.exit_code:
            text += f" with exit code {outcome.exit_code}"
        self._notify(outcome.event, run, text, partial(self._mark_notified, pods, outcome), outcome.exit_code)

    def _runs(self) -> dict[str, list[Object]]:
        pods: dict[str, list[Object]] = defaultdict(list)
        for pod in self._cluster.find("v1", "Pod", self._namespace, {**APP_LABEL}):
            run = run_id_of(pod)
            if run is not None:
                pods[run].append(pod)
        return pods

    def _recover(self, run: str, pods: list[Object]) -> None:
        due, _ = find_lost(pods, self._after_sec)
        lost = recover(self._cluster, self._namespace, due)
        if not lost:
            return
        is_being_removed = all("deletionTimestamp" in pod["metadata"] for pod in pods)
        if is_being_removed and not any(map(node_not_ready_condition, pods)):
            log("GUARD", f"removed pods of run {run} whose deletion was overdue")
            return
        names = ", ".join(f"{pod.name} ({pod.text})" for pod in lost)
        self._notify("recovered", run, f"run {run} was recovered: removed {names}", lambda: None, None)

    def _is_reported(self, run: str, pods: list[Object]) -> bool:
        """Whether the end of the run was reported, or waits for the webhook."""
        for notification in self._pending:
            if notification.event["run"] == run and notification.event["event"] != "recovered":
                return True
        return any(self._is_notified(pod) for pod in pods)

    def _notify(self, event: str, run: str, text: str, on_sent: Callable[[], None], exit_code: int | None) -> None:
        log("GUARD", text)
        value = {
            "event": event,
            "run": run,
            "namespace": self._namespace,
            "at": server_now().strftime("%Y-%m-%dT%H:%M:%SZ"),
            "exit_code": exit_code,
            "text": f"llmtrain: {text} (namespace {self._namespace})",
        }
        self._pending.append(Notification(value, on_sent))
        del self._pending[:-MAX_PENDING]

    def _send(self) -> None:
        """Send notifications in order: the next check begins with the first one that the webhook did not accept."""
        while self._pending:
            notification = self._pending[0]
            if not self._post(notification):
                return
            notification.on_sent()
            self._pending.pop(0)

    def _post(self, notification: Notification) -> bool:
        """False if the webhook did not accept it. Without a webhook the log line is enough."""
        if not self._webhook:
            return True
        try:
            post(self._webhook, notification.event)
        except (OSError, HTTPException, ValueError) as problem:  # also a server of another protocol
            if not self._has_warned_webhook:
                warn("GUARD", f"the webhook did not accept a notification ({reason(problem)}); will retry")
            self._has_warned_webhook = True
            return False
        self._has_warned_webhook = False
        return True

    def _is_notified(self, pod: Object) -> bool:
        meta = pod["metadata"]
        return NOTIFIED in (meta.get("annotations") or {}) or meta.get("uid") in self._notified

    def _mark_notified(self, pods: Iterable[Object], outcome: RunOutcome) -> None:
        for pod in pods:
            name = pod["metadata"]["name"]
            uid = pod["metadata"].get("uid", "")
            self._notified.add(uid)
            try:
                self._cluster.annotate_pod(name, self._namespace, uid, {NOTIFIED: outcome.event})
            except LlmtrainError as problem:
                if not self._has_warned_annotation:
                    text = "could not mark pods as notified; a restarted guard will notify again"
                    warn("GUARD", f"{text}: {problem.what}")
                self._has_warned_annotation = True


def post(url: str, event: dict[str, Any]) -> None:
    """Post one line of JSON. Chat services show its `text` field."""
    body = json.dumps(event).encode() + b"\n"
    headers = {"Content-Type": "application/json", "User-Agent": "llmtrain-guard"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=POST_TIMEOUT_SEC) as response:
        response.read(2**12)


def reason(problem: Exception) -> str:
    """The reason without the URL, which may contain a token."""
    if not isinstance(problem, OSError):
        return type(problem).__name__
    code = getattr(problem, "code", None)
    return f"HTTP {code}" if code else str(getattr(problem, "reason", None) or problem)


def find_outcome(pods: Iterable[Object], now: float | None = None) -> RunOutcome | None:
    """How a run ended, derived from its pods. None while it runs or is being deleted."""
    staying = [pod for pod in _newest(pods) if "deletionTimestamp" not in pod["metadata"]]
    if not staying:
        return None
    codes = [_code(pod) for pod in staying]
    # One usage or data error fails the run, whatever the others do: no kind of job retries it.
    mistakes = [code for code in codes if code in NO_RESTART_CODES]
    if mistakes:
        return RunOutcome(RunState.FAILED, worst_code(mistakes))
    if _have_succeeded(staying, codes):
        return RunOutcome(RunState.FINISHED, 0)
    if not all(map(_has_ended, staying)) or _may_be_retried(staying, now):
        return None
    return RunOutcome(RunState.FAILED, worst_code(codes))


def _have_succeeded(pods: list[Object], codes: list[int | None]) -> bool:
    # Pods that idle at the end stay Running, so only their logged exit codes show that they have ended.
    if all(map(_may_idle, pods)) and all(code == 0 for code in codes):
        return True
    if not all(map(_has_ended, pods)):
        return False
    decisive = pods
    if any(map(_is_elastic, pods)):  # the other pods of an elastic job come and go
        decisive = [pod for pod in pods if _replica(pod)[1] == "0"]
    return bool(decisive) and all(_phase(pod) == "Succeeded" for pod in decisive)


def _may_be_retried(pods: list[Object], now: float | None) -> bool:
    """Whether the controller may still replace pods that have all ended, of which some failed."""
    last = max(map(_ended_at, pods))
    if not last:
        return True
    ended_sec_ago = (now or server_now().timestamp()) - datetime.fromisoformat(last).timestamp()
    return ended_sec_ago < NO_RETRY_AFTER_SEC


def _newest(pods: Iterable[Object]) -> list[Object]:
    """The newest pod of each replica."""
    newest: dict[tuple[str, str], Object] = {}
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"])):
        newest[_replica(pod)] = pod
    return list(newest.values())


def _replica(pod: Object) -> tuple[str, str]:
    """(role, index) of the pod."""
    labels = pod["metadata"].get("labels") or {}
    for kind in all_kinds():
        if kind.index_label in labels:
            return labels.get(kind.role_label, ""), labels[kind.index_label]
    return "", pod["metadata"]["name"]


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase", ""))


def _has_ended(pod: Object) -> bool:
    return _phase(pod) in ("Succeeded", "Failed")


def _terminated(pod: Object) -> list[Object]:
    """The `terminated` states of its containers."""
    status = pod.get("status") or {}
    containers = list(status.get("initContainerStatuses") or [])
    containers += status.get("containerStatuses") or []
    ended = []
    for row in containers:
        state = row.get("state") or {}
        last = (row.get("lastState") or {}).get("terminated") or {}
        if "terminated" in state:
            ended.append(state["terminated"])
        # The container exits once, and waits after a restart.
        if _may_idle(pod) and last.get("exitCode") in FINAL_CODES:
            ended.append(last)
    return ended


def _code(pod: Object) -> int | None:
    codes = [state.get("exitCode") or 0 for state in _terminated(pod)]
    for kind in all_kinds():
        if _has_variable(pod, EXIT_CODES, kind.exit_codes):
            codes = [kind.llmtrain_code(code) for code in codes]
    return worst_code(codes)


def _has_variable(pod: Object, name: str, value: str | None) -> bool:
    for container in _containers(pod):
        for row in container.get("env") or []:
            if (row["name"], row.get("value", "")) == (name, value):
                return True
    return False


def _containers(pod: Object) -> list[Object]:
    return (pod.get("spec") or {}).get("containers") or []


def _is_elastic(pod: Object) -> bool:
    """Whether its command has `--nodes MIN:MAX`: such a job succeeds when pod 0 does (successPolicy)."""
    for container in _containers(pod):
        command = container.get("command") or []
        for option, value in zip_longest(command, command[1:], fillvalue=""):
            if option in ("--", "--no-python"):  # a user's own command follows
                break
            if option == "--nodes" and _RANGE.fullmatch(value):
                return True
            if option.startswith("--nnodes=") and _RANGE.fullmatch(option.removeprefix("--nnodes=")):
                return True
    return False


def _ended_at(pod: Object) -> str:
    """When its containers terminated. If unknown (never started, or the node was lost), the time of the last condition
    change, else of creation."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    ended = _latest(_terminated(pod), "finishedAt")
    changed = _latest(conditions, "lastTransitionTime")
    return ended or changed or str(pod["metadata"]["creationTimestamp"])


def _latest(rows: Iterable[Object], field: str) -> str:
    """The latest of these times, which sort as text; empty if there is none."""
    return max((str(row.get(field) or "") for row in rows), default="")


def _may_idle(pod: Object) -> bool:
    """Whether its job is of a kind whose pods keep running when they have ended."""
    idling = {kind.object_kind for kind in all_kinds() if kind.pods_idle_at_end}
    return any(owner.get("kind") in idling for owner in pod["metadata"].get("ownerReferences") or [])


def watch_namespace(cluster: Cluster, namespace: str, after_sec: float, webhook: str | None) -> None:
    """What the guard's pod runs: check all runs of a namespace until a signal arrives."""
    stop = threading.Event()
    for number in stop_signals():
        signal.signal(number, lambda *_: stop.set())
    log(
        "GUARD",
        f"watching namespace {namespace}: pods are replaced once their node has been NotReady for {after_sec:g} s",
    )
    is_in_pod = "KUBERNETES_SERVICE_HOST" in os.environ

    def touch_probe_file() -> None:
        if is_in_pod:
            Path(WATCHING).touch()

    watch(Guard(cluster, namespace, after_sec, webhook), POLL_SEC, touch_probe_file, stop.wait)


def watch(guard: Guard, poll_sec: float, on_alive: Callable[[], None], wait_for_stop: Callable[[float], bool]) -> None:
    """Check every `poll_sec` seconds until `wait_for_stop` returns True. An unreachable cluster is retried. `on_alive`
    is called after each check, once one has succeeded."""
    has_failed = False
    has_succeeded = False
    while True:
        try:
            guard.check()
        except LlmtrainError as problem:
            if not has_failed:
                warn("GUARD", f"{problem} Retrying.")
            has_failed = True
        else:
            if has_failed:
                log("GUARD", "the cluster is reachable again")
            has_failed = False
            has_succeeded = True
        if has_succeeded:
            on_alive()
        if wait_for_stop(poll_sec):
            return
