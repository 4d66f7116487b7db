"""How the containers of a run ended: what can still be seen of it in its pods."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

from llmtrain.distributed.worker_exit import INTERRUPTED, NO_RESTART_CODES
from llmtrain.kubernetes.api_errors import one_line
from llmtrain.kubernetes.client import Object
from llmtrain.kubernetes.server_clock import server_now
from llmtrain.launch.record import Record
from llmtrain.operate.status.events import event_time
from llmtrain.operate.status.lost_nodes import find_condition
from llmtrain.operate.status.pods import container_state, current_container, final_code, our_code
from llmtrain.operate.why.log_patterns import error_in, without_rank
from llmtrain.runs.exit_report import ExitReport, read_termination_message

_EXITED = re.compile(r"Pod: \S+?\.(\S+-(worker|master)-(\d+)) exited with code (\d+)")
PREFETCH = "prefetch"  # the init container
MARGIN_SEC = 120.0


@dataclass(frozen=True)
class ContainerExit:
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
    is_unreadable: bool = False
    from_run: ExitReport | None = None
    """The report in the run directory, where the pod is gone."""

    @property
    def is_gone(self) -> bool:
        """Its pod was deleted; an event or a report is all that is left."""
        return not self.container

    @property
    def severity(self) -> tuple[int, str]:
        """What cannot come from another's ending first."""
        return (0 if self.code in NO_RESTART_CODES else 2 if self.code == INTERRUPTED else 1), self.at

    @cached_property
    def report(self) -> ExitReport | None:
        """The process's own; of images of the first version, what its log shows."""
        report = read_termination_message(self.message) or self.from_run or error_in(self.lines)
        if report is None:
            return None
        remedy = one_line(report.remedy) if report.remedy else None
        return replace(report, message=without_rank(one_line(report.message)), remedy=remedy)

    @property
    def text(self) -> str:
        if self.code < 0:
            return f"{self.pod} (node {self.index}) failed before its container ran."
        word = f" ({self.reason})" if self.reason not in ("", "Error", "Completed") else ""
        at = f" at {self.at}" if self.at else ""
        what = "waits to be removed, after" if self.is_going else "ended with"
        return f"{self.pod} (node {self.index}) {what} exit code {self.code}{word}{at}."

    def idling(self, code: int, lines: tuple[str, ...]) -> "ContainerExit":
        return replace(self, code=code, lines=lines)


def with_lines(end: ContainerExit, lines: tuple[str, ...] | None) -> ContainerExit:
    return replace(end, lines=lines or (), is_unreadable=lines is None)


def histories(record: Record, nodes: dict[int, list[Object]]) -> list[list[ContainerExit]]:
    """For each node how it ended badly, newest first. Where its container runs under a StatefulSet, that is first."""
    return [[end for pod in reversed(own) for end in _of_pod(record, index, pod)] for index, own in nodes.items()]


def exits_from_events(record: Record, job: Object | None, events: Iterable[Object]) -> list[ContainerExit]:
    """The operator of a PyTorchJob deletes a pod before it makes it anew; an event is all that is left of it."""
    since = (job or {}).get("metadata", {}).get("creationTimestamp", "")
    found: dict[int, ContainerExit] = {}
    for event in sorted((e for e in events if e.get("reason") == "ExitedWithCode"), key=event_time):
        said = _EXITED.search(str(event.get("message", "")))
        if said and int(said[4]) and event_time(event) >= since:
            has_master_before = record.config.launch.pytorch_master and said[2] == "worker"
            index, code = int(said[3]) + has_master_before, our_code(record, int(said[4]))
            # No container: its log went with it.
            found[index] = ContainerExit(said[1], index, "", code, at=event_time(event))
    return list(found.values())


def in_time(record: Record, endings: list[ContainerExit]) -> list[ContainerExit]:
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


def _of_pod(record: Record, index: int, pod: Object) -> Iterable[ContainerExit]:
    row = current_container(pod, record.workload.container)
    state, last, _ = container_state(pod, record.workload.container)
    status, disruption = pod.get("status") or {}, find_condition(pod, "DisruptionTarget") or {}
    base = ContainerExit(
        pod=pod["metadata"]["name"],
        index=index,
        container=row.get("name", record.workload.container),
        code=0,
        pod_reason=status.get("reason") or "",
        pod_message=status.get("message") or "",
        node=(pod.get("spec") or {}).get("nodeName") or "",
        disruption=disruption.get("reason") or "",
        disruption_message=disruption.get("message") or "",
    )
    if "running" in state and record.config.launch.kind == "stateful_set" and final_code(record, pod) is None:
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
