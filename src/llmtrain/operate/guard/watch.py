"""What the guard does, from inside the cluster: it gives up pods on lost machines, and tells a webhook when a run has
finished, failed or been recovered.

It sees pods and nothing else, neither jobs nor machines nor volumes, so that whoever takes it over gains little. What
it has told it writes on the pods themselves: a guard that was started again tells nothing twice.
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

from llmtrain.distributed.exit_codes import FOR_GOOD, from_pytorchjob_code
from llmtrain.distributed.worker_exit import NO_RESTART_CODES
from llmtrain.env import EXIT_CODES
from llmtrain.errors import LlmtrainError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.kubernetes.labels import APP_LABEL, NOTIFIED, run_id_of
from llmtrain.kubernetes.server_clock import server_now
from llmtrain.logs import log, warn
from llmtrain.operate.guard.recover import find_lost, recover
from llmtrain.operate.status.lost_nodes import node_is_not_ready
from llmtrain.operate.status.pods import INDEX_LABELS, ROLE_LABEL, worst_code
from llmtrain.operate.status.progress import read_progress

# Between two tries of a Job lie six minutes at most: a run without any pod for longer does not come back.
GIVEN_UP_SEC = 420.0
POST_SEC = 10.0
OUTBOX = 1000  # events that are kept for a webhook that does not answer


@dataclass(frozen=True)
class End:
    event: str
    """finished or failed"""
    exit_code: int | None


@dataclass(frozen=True)
class Notification:
    """An event, and what to do once it is told."""

    event: dict[str, Any]
    when_sent: Callable[[], None]


class Guard:
    def __init__(
        self, cluster: Cluster, namespace: str, after_sec: float, webhook: str | None = None, with_logs: bool = False
    ) -> None:
        self._cluster, self._namespace, self._after_sec = cluster, namespace, after_sec
        self._webhook, self._with_logs = webhook, with_logs
        self._outbox: list[Notification] = []
        self._is_silent = self._cannot_mark = False
        self._told: set[str] = set()

    def look(self) -> None:
        """Once: at all runs of the namespace."""
        problems: list[LlmtrainError] = []
        for run, pods in self._runs().items():
            try:
                self._look_at(run, pods)
            except LlmtrainError as problem:  # of one run; the others are looked at all the same
                problems.append(problem)
        self._send()
        if problems:
            raise problems[0]

    def _look_at(self, run: str, pods: list[Object]) -> None:
        self._recover(run, pods)
        end = self._end(pods)
        if end is not None and not any(self._is_told(pod) for pod in pods) and not self._is_waiting(run):
            said = f"run {run} has {end.event}" + (f" with exit code {end.exit_code}" if end.exit_code else "")
            self._tell(end.event, run, said, partial(self._mark, pods, end), end.exit_code)

    def _runs(self) -> dict[str, list[Object]]:
        found: dict[str, list[Object]] = defaultdict(list)
        for pod in self._cluster.find("v1", "Pod", self._namespace, {**APP_LABEL}):
            if (run := run_id_of(pod)) is not None:
                found[run].append(pod)
        return found

    def _recover(self, run: str, pods: list[Object]) -> None:
        lost, _ = find_lost(pods, self._after_sec)
        lost = recover(self._cluster, self._namespace, lost)
        is_being_removed = all("deletionTimestamp" in pod["metadata"] for pod in pods)
        if lost and is_being_removed and not any(map(node_is_not_ready, pods)):
            log("GUARD", f"pods of run {run} that should have gone are removed")
        elif lost:
            gone = ", ".join(f"{pod.name} ({pod.text})" for pod in lost)
            self._tell("recovered", run, f"run {run} goes on without {gone}", lambda: None, None)

    def _end(self, pods: list[Object]) -> End | None:
        end = find_end(pods)
        return self._end_of_set(pods) if end is None and self._with_logs and _is_set(pods) else end

    def _end_of_set(self, pods: list[Object]) -> End | None:
        """Pods of a StatefulSet do not end: they say that they have, and wait."""
        first = next((pod for pod in pods if _node(pod)[1] == "0" and _phase(pod) == "Running"), None)
        if first is None:
            return None
        lines = self._cluster.log(
            first["metadata"]["name"], self._namespace, first["spec"]["containers"][0]["name"], tail=5
        )
        code = read_progress(lines).idle_code
        return None if code is None else End("failed" if code else "finished", code)

    def _is_waiting(self, run: str) -> bool:
        """Its end is in the outbox already."""
        return any(letter.event["run"] == run and letter.event["event"] != "recovered" for letter in self._outbox)

    def _tell(self, event: str, run: str, text: str, when_sent: Callable[[], None], exit_code: int | None) -> None:
        log("GUARD", text)
        row = {
            "event": event,
            "run": run,
            "namespace": self._namespace,
            "at": server_now().strftime("%Y-%m-%dT%H:%M:%SZ"),
            "exit_code": exit_code,
            "text": f"llmtrain: {text} (namespace {self._namespace})",
        }
        self._outbox = [*self._outbox, Notification(row, when_sent)][-OUTBOX:]

    def _send(self) -> None:
        while self._outbox:
            letter = self._outbox[0]
            if self._webhook:
                try:
                    post(self._webhook, letter.event)
                except (OSError, HTTPException, ValueError) as problem:  # also what is no HTTP, or no address
                    if not self._is_silent:
                        warn("GUARD", f"the webhook does not take what it is told ({reason(problem)}); trying again")
                    self._is_silent = True
                    return
                self._is_silent = False
            letter.when_sent()
            self._outbox.pop(0)

    def _is_told(self, pod: Object) -> bool:
        return NOTIFIED in (pod["metadata"].get("annotations") or {}) or pod["metadata"].get("uid") in self._told

    def _mark(self, pods: Iterable[Object], end: End) -> None:
        """On the pods, for whoever comes after us; and in mind, should that be refused."""
        for meta in (pod["metadata"] for pod in pods):
            self._told.add(meta.get("uid", ""))
            try:
                self._cluster.annotate_pod(meta["name"], self._namespace, meta.get("uid", ""), {NOTIFIED: end.event})
            except LlmtrainError as problem:
                if not self._cannot_mark:
                    warn(
                        "GUARD",
                        f"what was told cannot be written down, and is told again by the next guard: {problem.what}",
                    )
                self._cannot_mark = True


def post(url: str, event: dict[str, Any]) -> None:
    """One line of JSON. Chat services show its `text`."""
    body = json.dumps(event).encode() + b"\n"
    headers = {"Content-Type": "application/json", "User-Agent": "llmtrain-guard"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=POST_SEC) as answer:
        answer.read(2**12)


def reason(problem: Exception) -> str:
    """Without the address, which may be a password."""
    if not isinstance(problem, OSError):
        return type(problem).__name__
    code = getattr(problem, "code", None)
    return f"HTTP {code}" if code else str(getattr(problem, "reason", None) or problem)


def find_end(pods: Iterable[Object], now: float | None = None) -> End | None:
    """How a run has ended, told from its pods. None while it goes on, or is being removed by somebody."""
    staying = [pod for pod in _newest(pods) if "deletionTimestamp" not in pod["metadata"]]
    codes = {pod["metadata"]["name"]: _code(pod) for pod in staying}
    mistakes = [code for code in codes.values() if code in NO_RESTART_CODES]
    if mistakes:  # they end every kind of job at once
        return End("failed", worst_code(mistakes))
    if staying and all(codes[pod["metadata"]["name"]] == 0 and _is_set([pod]) for pod in staying):
        return End("finished", 0)
    if not staying or any(_phase(pod) not in ("Succeeded", "Failed") for pod in staying):
        return None
    counted = [pod for pod in staying if _node(pod)[1] == "0"] if any(map(_is_elastic, staying)) else staying
    if counted and all(_phase(pod) == "Succeeded" for pod in counted):
        return End("finished", 0)
    last = max((_ended_at(pod) for pod in staying), default="")
    if not last or (now or server_now().timestamp()) - datetime.fromisoformat(last).timestamp() < GIVEN_UP_SEC:
        return None
    return End("failed", worst_code(codes.values()))


def _newest(pods: Iterable[Object]) -> list[Object]:
    """Of each node."""
    found: dict[tuple[str, str], Object] = {}
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"])):
        found[_node(pod)] = pod
    return list(found.values())


def _node(pod: Object) -> tuple[str, str]:
    """What tells the nodes of a run apart: its role, and its number."""
    labels = pod["metadata"].get("labels") or {}
    number = next((labels[label] for label in INDEX_LABELS if label in labels), pod["metadata"]["name"])
    return labels.get(ROLE_LABEL, ""), number


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase", ""))


def _ends(pod: Object) -> list[Object]:
    status = pod.get("status") or {}
    rows = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    ended = [row["state"]["terminated"] for row in rows if "terminated" in (row.get("state") or {})]
    if _is_set([pod]):  # its container exits once, and waits after a restart
        last = [(row.get("lastState") or {}).get("terminated") or {} for row in rows]
        ended += [each for each in last if each.get("exitCode") in FOR_GOOD]
    return ended


def _code(pod: Object) -> int | None:
    codes = [end.get("exitCode") or 0 for end in _ends(pod)]
    if (EXIT_CODES, "pytorchjob") in _variables(pod):
        codes = [from_pytorchjob_code(code) for code in codes]
    return worst_code(codes)


def _variables(pod: Object) -> set[tuple[str, str]]:
    rows = [row for container in _containers(pod) for row in container.get("env") or []]
    return {(row["name"], row.get("value", "")) for row in rows}


def _containers(pod: Object) -> list[Object]:
    return (pod.get("spec") or {}).get("containers") or []


def _is_elastic(pod: Object) -> bool:
    """Its command says `--nodes 1:2`: the job has ended when node 0 has (successPolicy)."""
    words = [word for container in _containers(pod) for word in container.get("command") or []]
    return any(re.fullmatch(r"(--nnodes=)?\d+:\d+", word) for word in words)


def _ended_at(pod: Object) -> str:
    """When its containers ended; where no time is known (none was started, or the machine was lost), when the pod last
    changed, or was made."""
    changes = [str(row.get("lastTransitionTime") or "") for row in (pod.get("status") or {}).get("conditions") or []]
    ended = max((str(end.get("finishedAt") or "") for end in _ends(pod)), default="")
    return ended or max(changes, default="") or str(pod["metadata"]["creationTimestamp"])


def _is_set(pods: Iterable[Object]) -> bool:
    return any(
        owner.get("kind") == "StatefulSet" for pod in pods for owner in pod["metadata"].get("ownerReferences") or []
    )


def watch(guard: Guard, every_sec: float, when_alive: Callable[[], None], is_told: Callable[[float], bool]) -> None:
    """Look again and again; `is_told` waits so long, and says whether to end. A cluster that does not answer is asked
    again. `when_alive` is called each time, once the first look has succeeded."""
    is_away, is_first = False, True
    while True:
        try:
            guard.look()
        except LlmtrainError as problem:
            if not is_away:
                warn("GUARD", f"{problem} Trying again.")
            is_away = True
        else:
            if is_away:
                log("GUARD", "the cluster answers again")
            is_away = False
            is_first = False
        if not is_first:
            when_alive()
        if is_told(every_sec):
            return
