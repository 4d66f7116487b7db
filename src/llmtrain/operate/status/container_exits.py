"""Exits of a run's containers, from the status of its pods or, for deleted pods, from events."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

from llmtrain.distributed.worker_exit import severity
from llmtrain.kubernetes.client import Object
from llmtrain.launch.record import Record
from llmtrain.operate.status.events import event_time
from llmtrain.operate.status.lost_nodes import find_condition
from llmtrain.operate.status.pods import container_state, current_container, final_code, our_code
from llmtrain.operate.why.log_patterns import error_in, without_rank
from llmtrain.redact import redacted_line
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
    """llmtrain's own exit code, without the offset of a PyTorchJob; -1 if the pod failed before its container ran."""
    reason: str = ""
    """Reason in the container status: OOMKilled, Error, ContainerStatusUnknown, ..."""
    finished_at: str = ""
    message: str = ""
    is_previous: bool = False
    """Of the container before the current one."""
    is_running: bool = False
    """A container of a StatefulSet that runs according to its status; its log may have an exit code."""
    pod_reason: str = ""
    pod_message: str = ""
    node: str = ""
    disruption: str = ""
    """Reason of the DisruptionTarget condition: PreemptionByScheduler, EvictionByEvictionAPI, ..."""
    disruption_message: str = ""
    lines: tuple[str, ...] = ()
    is_unreadable: bool = False
    run_report: ExitReport | None = None
    """The report in the run directory, if the pod was deleted."""

    @property
    def is_pod_deleted(self) -> bool:
        """The exit is known from an event or a report only."""
        return not self.container

    @property
    def label(self) -> str:
        return pod_label(self.index, self.pod)

    @property
    def severity(self) -> tuple[int, str]:
        """Sort key: root causes before exits that may follow from another process's exit."""
        return severity(self.code), self.finished_at

    @cached_property
    def report(self) -> ExitReport | None:
        """Written by the process; for images of the first version, parsed from its log."""
        report = read_termination_message(self.message) or self.run_report or error_in(self.lines)
        if report is None:
            return None
        remedy = redacted_line(report.remedy) if report.remedy else None
        return replace(report, message=without_rank(redacted_line(report.message)), remedy=remedy)

    @property
    def text(self) -> str:
        if self.code < 0:
            return f"{self.label} failed before its container ran."
        reason = f" ({self.reason})" if self.reason not in ("", "Error", "Completed") else ""
        at = f" at {self.finished_at}" if self.finished_at else ""
        suffix = ", and waits to be removed" if self.is_running else ""
        return f"{self.label} ended with exit code {self.code}{reason}{at}{suffix}."


def pod_label(index: int, name: str) -> str:
    return f"Pod {index} ({name})"


def with_log(exit_: ContainerExit, lines: tuple[str, ...] | None) -> ContainerExit:
    """`lines`: None if the log cannot be read."""
    return replace(exit_, lines=lines or (), is_unreadable=lines is None)


def exit_histories(record: Record, pods: dict[int, list[Object]]) -> list[list[ContainerExit]]:
    """Per pod index, its nonzero exits, newest first; a running container of a StatefulSet comes before them."""
    return [[each for pod in reversed(own) for each in _pod_exits(record, index, pod)] for index, own in pods.items()]


def exits_from_events(record: Record, job: Object | None, events: Iterable[Object]) -> list[ContainerExit]:
    """Exits of pods of a PyTorchJob: its operator deletes a failed pod before it creates the next one."""
    since = (job or {}).get("metadata", {}).get("creationTimestamp", "")
    exits: dict[int, ContainerExit] = {}
    for event in sorted((each for each in events if each.get("reason") == "ExitedWithCode"), key=event_time):
        match = _EXITED.search(str(event.get("message", "")))
        if match and int(match[4]) and event_time(event) >= since:
            has_master_before = record.config.launch.pytorch_master and match[2] == "worker"
            index, code = int(match[3]) + has_master_before, our_code(record, int(match[4]))
            # No container: its log was deleted with the pod.
            exits[index] = ContainerExit(match[1], index, "", code, finished_at=event_time(event))
    return list(exits.values())


def related_exits(record: Record, exits: list[ContainerExit]) -> list[ContainerExit]:
    """Exits that may have one cause: peers notice a failure within the timeouts. Earlier exits are dropped."""
    timeouts = record.config.distributed
    within = max(timeouts.timeout_sec, timeouts.join_timeout_sec, timeouts.master_ready_timeout_sec) + MARGIN_SEC
    newest = max((_timestamp(each) for each in exits if each.finished_at), default=0.0)
    return [each for each in exits if not each.finished_at or each.is_running or newest - _timestamp(each) <= within]


def _timestamp(exit_: ContainerExit) -> float:
    return datetime.fromisoformat(f"{exit_.finished_at[:19]}+00:00").timestamp()


def _pod_exits(record: Record, index: int, pod: Object) -> Iterable[ContainerExit]:
    container = current_container(pod, record.workload.container)
    state, last, _ = container_state(pod, record.workload.container)
    status, disruption = pod.get("status") or {}, find_condition(pod, "DisruptionTarget") or {}
    base = ContainerExit(
        pod=pod["metadata"]["name"],
        index=index,
        container=container.get("name", record.workload.container),
        code=0,
        pod_reason=status.get("reason") or "",
        pod_message=status.get("message") or "",
        node=(pod.get("spec") or {}).get("nodeName") or "",
        disruption=disruption.get("reason") or "",
        disruption_message=disruption.get("message") or "",
    )
    if "running" in state and record.config.launch.kind == "stateful_set" and final_code(record, pod) is None:
        yield replace(base, is_running=True)
    for terminated, is_previous in ((state.get("terminated"), False), (last.get("terminated"), True)):
        if terminated and terminated.get("exitCode"):
            yield replace(
                base,
                code=our_code(record, terminated["exitCode"]),
                reason=terminated.get("reason") or "",
                message=terminated.get("message") or "",
                finished_at=terminated.get("finishedAt") or "",
                is_previous=is_previous,
            )
    if not state and status.get("phase") == "Failed":  # rejected by its node, or evicted before it started
        yield replace(base, code=-1)
