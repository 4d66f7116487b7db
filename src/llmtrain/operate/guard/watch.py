"""The guard, which runs inside the cluster: it replaces pods on lost nodes and notifies a webhook when a run finishes,
fails or is recovered.

It may read pods only, not logs, jobs, nodes or volumes, so that little is gained by compromising it. Sent
notifications are recorded as annotations on the pods, so a restarted guard does not send them again.
"""

import json
import re
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from http.client import HTTPException
from typing import Any

from llmtrain.distributed.exit_codes import FINAL_CODES, from_pytorchjob_code
from llmtrain.distributed.worker_exit import NO_RESTART_CODES
from llmtrain.env import EXIT_CODES
from llmtrain.errors import LlmtrainError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.kubernetes.labels import APP_LABEL, NOTIFIED, run_id_of
from llmtrain.kubernetes.server_clock import server_now
from llmtrain.logs import log, warn
from llmtrain.operate.guard.recover import find_lost, recover
from llmtrain.operate.status.lost_nodes import node_not_ready_condition
from llmtrain.operate.status.pods import INDEX_LABELS, ROLE_LABEL, worst_code

# A Job waits at most six minutes between retries: a run whose pods have all failed for longer is over.
NO_RETRY_AFTER_SEC = 420.0
POST_TIMEOUT_SEC = 10.0
MAX_PENDING = 1000  # notifications kept while the webhook is unavailable


@dataclass(frozen=True)
class RunOutcome:
    """How a whole run ended. How one of its processes ended is an ExitReport or a ContainerExit."""

    event: str
    """finished or failed"""
    exit_code: int | None
    """Of the pod that decided it; None if no container ran."""


@dataclass(frozen=True)
class Notification:
    event: dict[str, Any]
    on_sent: Callable[[], None]


class Guard:
    def __init__(self, cluster: Cluster, namespace: str, after_sec: float, webhook: str | None = None) -> None:
        self._cluster, self._namespace, self._after_sec, self._webhook = cluster, namespace, after_sec, webhook
        self._pending: list[Notification] = []
        self._has_warned_webhook = self._has_warned_annotation = False
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
        if outcome is not None and not any(self._is_notified(pod) for pod in pods) and not self._has_pending_end(run):
            code = f" with exit code {outcome.exit_code}" if outcome.exit_code else ""
            text, on_sent = f"run {run} has {outcome.event}{code}", partial(self._mark_notified, pods, outcome)
            self._notify(outcome.event, run, text, on_sent, outcome.exit_code)

    def _runs(self) -> dict[str, list[Object]]:
        pods: dict[str, list[Object]] = defaultdict(list)
        for pod in self._cluster.find("v1", "Pod", self._namespace, {**APP_LABEL}):
            if (run := run_id_of(pod)) is not None:
                pods[run].append(pod)
        return pods

    def _recover(self, run: str, pods: list[Object]) -> None:
        lost, _ = find_lost(pods, self._after_sec)
        lost = recover(self._cluster, self._namespace, lost)
        is_being_removed = all("deletionTimestamp" in pod["metadata"] for pod in pods)
        if lost and is_being_removed and not any(map(node_not_ready_condition, pods)):
            log("GUARD", f"removed pods of run {run} whose deletion was overdue")
        elif lost:
            names = ", ".join(f"{pod.name} ({pod.text})" for pod in lost)
            self._notify("recovered", run, f"run {run} was recovered: removed {names}", lambda: None, None)

    def _has_pending_end(self, run: str) -> bool:
        return any(each.event["run"] == run and each.event["event"] != "recovered" for each in self._pending)

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
        self._pending = [*self._pending, Notification(value, on_sent)][-MAX_PENDING:]

    def _send(self) -> None:
        while self._pending:
            notification = self._pending[0]
            if self._webhook:
                try:
                    post(self._webhook, notification.event)
                except (OSError, HTTPException, ValueError) as problem:  # also a server of another protocol
                    if not self._has_warned_webhook:
                        warn("GUARD", f"the webhook did not accept a notification ({reason(problem)}); will retry")
                    self._has_warned_webhook = True
                    return
                self._has_warned_webhook = False
            notification.on_sent()
            self._pending.pop(0)

    def _is_notified(self, pod: Object) -> bool:
        meta = pod["metadata"]
        return NOTIFIED in (meta.get("annotations") or {}) or meta.get("uid") in self._notified

    def _mark_notified(self, pods: Iterable[Object], outcome: RunOutcome) -> None:
        for meta in (pod["metadata"] for pod in pods):
            uid = meta.get("uid", "")
            self._notified.add(uid)
            try:
                self._cluster.annotate_pod(meta["name"], self._namespace, uid, {NOTIFIED: outcome.event})
            except LlmtrainError as problem:
                if not self._has_warned_annotation:
                    warn(
                        "GUARD",
                        f"could not mark pods as notified; a restarted guard will notify again: {problem.what}",
                    )
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
    codes = {pod["metadata"]["name"]: _code(pod) for pod in staying}
    mistakes = [code for code in codes.values() if code in NO_RESTART_CODES]
    if mistakes:  # never retried, by any kind of job
        return RunOutcome("failed", worst_code(mistakes))
    if staying and all(codes[pod["metadata"]["name"]] == 0 and _is_stateful_set(pod) for pod in staying):
        return RunOutcome("finished", 0)
    if not staying or any(_phase(pod) not in ("Succeeded", "Failed") for pod in staying):
        return None
    decisive = [pod for pod in staying if _replica(pod)[1] == "0"] if any(map(_is_elastic, staying)) else staying
    if decisive and all(_phase(pod) == "Succeeded" for pod in decisive):
        return RunOutcome("finished", 0)
    last = max((_ended_at(pod) for pod in staying), default="")
    if not last or (now or server_now().timestamp()) - datetime.fromisoformat(last).timestamp() < NO_RETRY_AFTER_SEC:
        return None
    return RunOutcome("failed", worst_code(codes.values()))


def _newest(pods: Iterable[Object]) -> list[Object]:
    """The newest pod of each replica."""
    newest: dict[tuple[str, str], Object] = {}
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"])):
        newest[_replica(pod)] = pod
    return list(newest.values())


def _replica(pod: Object) -> tuple[str, str]:
    """(role, index) of the pod."""
    labels = pod["metadata"].get("labels") or {}
    index = next((labels[label] for label in INDEX_LABELS if label in labels), pod["metadata"]["name"])
    return labels.get(ROLE_LABEL, ""), index


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase", ""))


def _terminated(pod: Object) -> list[Object]:
    """The `terminated` states of its containers."""
    status = pod.get("status") or {}
    rows = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    ended = [row["state"]["terminated"] for row in rows if "terminated" in (row.get("state") or {})]
    if _is_stateful_set(pod):  # its container exits once, and waits after a restart
        last = [(row.get("lastState") or {}).get("terminated") or {} for row in rows]
        ended += [each for each in last if each.get("exitCode") in FINAL_CODES]
    return ended


def _code(pod: Object) -> int | None:
    codes = [state.get("exitCode") or 0 for state in _terminated(pod)]
    if (EXIT_CODES, "pytorchjob") in _variables(pod):
        codes = [from_pytorchjob_code(code) for code in codes]
    return worst_code(codes)


def _variables(pod: Object) -> set[tuple[str, str]]:
    rows = [row for container in _containers(pod) for row in container.get("env") or []]
    return {(row["name"], row.get("value", "")) for row in rows}


def _containers(pod: Object) -> list[Object]:
    return (pod.get("spec") or {}).get("containers") or []


def _is_elastic(pod: Object) -> bool:
    """Whether its command has `--nodes MIN:MAX`: such a job succeeds when pod 0 does (successPolicy)."""
    words = [word for container in _containers(pod) for word in container.get("command") or []]
    return any(re.fullmatch(r"(--nnodes=)?\d+:\d+", word) for word in words)


def _ended_at(pod: Object) -> str:
    """When its containers terminated. If unknown (never started, or the node was lost), the time of the last condition
    change, else of creation."""
    changes = [str(row.get("lastTransitionTime") or "") for row in (pod.get("status") or {}).get("conditions") or []]
    ended = max((str(state.get("finishedAt") or "") for state in _terminated(pod)), default="")
    return ended or max(changes, default="") or str(pod["metadata"]["creationTimestamp"])


def _is_stateful_set(pod: Object) -> bool:
    return any(owner.get("kind") == "StatefulSet" for owner in pod["metadata"].get("ownerReferences") or [])


def watch(guard: Guard, poll_sec: float, on_alive: Callable[[], None], wait_for_stop: Callable[[float], bool]) -> None:
    """Check every `poll_sec` seconds until `wait_for_stop` returns True. An unreachable cluster is retried. `on_alive`
    is called after each check, once one has succeeded."""
    has_failed, has_succeeded = False, False
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
