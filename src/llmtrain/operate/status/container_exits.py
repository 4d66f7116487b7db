"""How the containers of a run ended: what can still be seen of it in its pods."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

from llmtrain.distributed.worker_exit import NO_RESTART_CODES, TOLD
from llmtrain.kubernetes.client import Object
from llmtrain.kubernetes.server_clock import server_now
from llmtrain.launch.record import Record
from llmtrain.operate.status.events import event_time
from llmtrain.operate.status.lost_nodes import find_condition
from llmtrain.operate.status.pods import container_state, current_container, our_code
from llmtrain.operate.why.log_patterns import Said, error_in
from llmtrain.runs.exit_report import read_termination_message

_EXITED = re.compile(r"Pod: \S+?\.(\S+-(worker|master)-(\d+)) exited with code (\d+)")
PREFETCH = "prefetch"  # the init container
MARGIN_SEC = 120.0


@dataclass(frozen=True)
class Ending:
    pod: str
    index: int
    container: str
    code: int
    """As the contract has it. Under a StatefulSet, also what a pod that waits has said."""
    reason: str = ""
    """The cluster's word: OOMKilled, Error, ContainerStatusUnknown, ..."""
    at: str = ""
    message: str = ""
    is_previous: bool = False
    """Of the container before the one that is there now."""
    is_going: bool = False
    """It has not ended, as far as the cluster knows."""
    pod_reason: str = ""
    pod_message: str = ""
    node: str = ""
    disruption: str = ""
    """Why the cluster itself ended the pod: PreemptionByScheduler, EvictionByEvictionAPI, ..."""
    disruption_message: str = ""
    lines: tuple[str, ...] = ()
    prefetch_lines: tuple[str, ...] = ()
    """Of the pod's init container, whose mistakes the trainer ends with."""
    is_unreadable: bool = False

    @property
    def severity(self) -> tuple[int, str]:
        """What cannot come from another's ending first."""
        return (0 if self.code in NO_RESTART_CODES else 2 if self.code == TOLD else 1), self.at

    @cached_property
    def error(self) -> Said | None:
        report = read_termination_message(self.message)
        return Said.from_report(report) if report else error_in(self.lines)

    @property
    def text(self) -> str:
        if self.code < 0:
            return f"{self.pod} (node {self.index}) failed before its container ran."
        word = f" ({self.reason})" if self.reason not in ("", "Error", "Completed") else ""
        at = f" at {self.at}" if self.at else ""
        what = "waits to be removed, after" if self.is_going else "ended with"
        return f"{self.pod} (node {self.index}) {what} exit code {self.code}{word}{at}."

    def of_prefetch(self) -> "Ending":
        """The init container of the same pod, for its log."""
        return replace(self, container=PREFETCH, is_previous=False)

    def idling(self, code: int, lines: tuple[str, ...]) -> "Ending":
        return replace(self, code=code, lines=lines)


def with_lines(end: Ending, lines: tuple[str, ...] | None, prefetch: tuple[str, ...] | None = None) -> Ending:
    return replace(end, lines=lines or (), prefetch_lines=prefetch or (), is_unreadable=lines is None)


def histories(record: Record, nodes: dict[int, list[Object]]) -> list[list[Ending]]:
    """For each node how it ended badly, newest first. Where its container runs under a StatefulSet, that is first."""
    return [[end for pod in reversed(own) for end in _of_pod(record, index, pod)] for index, own in nodes.items()]


def exits_from_events(record: Record, job: Object | None, events: Iterable[Object]) -> list[Ending]:
    """The operator of a PyTorchJob deletes a pod before it makes it anew; an event is all that is left of it."""
    since = (job or {}).get("metadata", {}).get("creationTimestamp", "")
    found: dict[int, Ending] = {}
    for event in sorted((e for e in events if e.get("reason") == "ExitedWithCode"), key=event_time):
        said = _EXITED.search(str(event.get("message", "")))
        if said and int(said[4]) and event_time(event) >= since:
            has_master_before = record.config.launch.pytorch_master and said[2] == "worker"
            index, code = int(said[3]) + has_master_before, our_code(record, int(said[4]))
            # No container: its log went with it.
            found[index] = Ending(said[1], index, "", code, at=event_time(event))
    return list(found.values())


def in_time(record: Record, endings: list[Ending]) -> list[Ending]:
    """Those that may come of one thing: peers notice within the timeouts. What was long before is another story."""
    timeouts = record.config.distributed
    within = max(timeouts.timeout_sec, timeouts.join_timeout_sec, timeouts.master_ready_timeout_sec) + MARGIN_SEC
    times = [seconds_of(end.at) for end in endings if end.at]
    newest = max(times, default=0.0)
    return [end for end in endings if not end.at or end.is_going or newest - seconds_of(end.at) <= within]


def seconds_of(stamp: str) -> float:
    """A time of Kubernetes, whose fractions have any number of digits."""
    return datetime.fromisoformat(f"{stamp[:19]}+00:00").timestamp()


def age_of(stamp: str) -> float:
    return max(0.0, server_now().timestamp() - seconds_of(stamp))


def _of_pod(record: Record, index: int, pod: Object) -> Iterable[Ending]:
    row = current_container(pod, record.kind.container)
    state, last, _ = container_state(pod, record.kind.container)
    status, disruption = pod.get("status") or {}, find_condition(pod, "DisruptionTarget") or {}
    base = Ending(
        pod=pod["metadata"]["name"],
        index=index,
        container=row.get("name", record.kind.container),
        code=0,
        pod_reason=status.get("reason") or "",
        pod_message=status.get("message") or "",
        node=(pod.get("spec") or {}).get("nodeName") or "",
        disruption=disruption.get("reason") or "",
        disruption_message=disruption.get("message") or "",
    )
    if "running" in state and record.config.launch.kind == "stateful_set":
        yield replace(base, is_going=True)
    for ended, is_previous in ((state.get("terminated"), False), (last.get("terminated"), True)):
        if ended and ended.get("exitCode"):
            yield replace(
                base,
                code=our_code(record, ended["exitCode"]),
                reason=ended.get("reason") or "",
                message=ended.get("message") or "",
                at=ended.get("finishedAt") or "",
                is_previous=is_previous,
            )
    if not state and status.get("phase") == "Failed":  # refused by its machine, or evicted before it began
        yield replace(base, code=-1)
