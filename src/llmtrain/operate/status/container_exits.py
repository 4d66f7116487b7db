"""Exits of a run's containers, from the status of its pods or, for deleted pods, from events."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

from llmtrain.compat.logged_errors import last_error
from llmtrain.core.logs import without_rank
from llmtrain.core.redact import redacted_line
from llmtrain.distributed.worker_exit import severity
from llmtrain.kubernetes.client import Object
from llmtrain.launch.record import Record
from llmtrain.operate.status.events import event_time
from llmtrain.operate.status.lost_nodes import find_condition
from llmtrain.operate.status.pods import container_state, current_container, final_code, our_code
from llmtrain.runs.exit_report import ExitReport, read_termination_message

MARGIN_SEC = 120.0  # added to the timeouts of a run, for its pods to exit and for clocks that differ


@dataclass(frozen=True)
class ContainerExit:
    pod: str
    index: int
    container: str
    code: int
    """The code of llmtrain's contract, untranslated; -1 if the pod failed before its container ran."""
    reason: str = ""
    """Reason in the container status: OOMKilled, Error, ContainerStatusUnknown, ..."""
    finished_at: str = ""
    message: str = ""
    is_previous: bool = False
    """Whether this is the exit of the container before the current one."""
    is_running: bool = False
    """It runs according to its status, but its log may have an exit code: pods of some kinds idle at the end."""
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
        """Written by the process; for images of 0.1.0, parsed from its log."""
        report = read_termination_message(self.message) or self.run_report or report_from_log(self.lines)
        if report is None:
            return None
        # A report comes from a pod, which may write anything into it.
        remedy = redacted_line(report.remedy) if report.remedy else None
        return replace(report, message=without_rank(redacted_line(report.message)), remedy=remedy)

    @property
    def text(self) -> str:
        if self.code < 0:
            return f"{self.label} failed before its container ran."
        text = f"{self.label} ended with exit code {self.code}"
        if self.reason not in ("", "Error", "Completed"):  # these add nothing to the code
            text += f" ({self.reason})"
        if self.finished_at:
            text += f" at {self.finished_at}"
        if self.is_running:
            text += ", and waits to be removed"
        return f"{text}."


def pod_label(index: int, name: str) -> str:
    return f"Pod {index} ({name})"


def report_from_log(lines: Sequence[str]) -> ExitReport | None:
    logged = last_error(lines)
    return ExitReport(None, **vars(logged)) if logged else None


def with_log(exit_: ContainerExit, lines: tuple[str, ...] | None) -> ContainerExit:
    """`lines`: None if the log cannot be read."""
    return replace(exit_, lines=lines or (), is_unreadable=lines is None)


def exit_histories(record: Record, pods: dict[int, list[Object]]) -> list[list[ContainerExit]]:
    """Per pod index, its nonzero exits, newest first; a container that may idle comes before them."""
    histories = []
    for index, own in pods.items():
        history: list[ContainerExit] = []
        for pod in reversed(own):
            history += _pod_exits(record, index, pod)
        histories.append(history)
    return histories


def exits_from_events(record: Record, job: Object | None, events: Iterable[Object]) -> list[ContainerExit]:
    """Exits of pods that are gone: some operators delete a failed pod before they create the next one."""
    since = (job or {}).get("metadata", {}).get("creationTimestamp", "")
    exits: dict[int, ContainerExit] = {}  # of each node rank the newest
    exited = [event for event in events if event.get("reason") == "ExitedWithCode"]
    for event in sorted(exited, key=event_time):
        seen = record.kind.exit_in_event(str(event.get("message", "")))
        if seen and seen.code and event_time(event) >= since:
            code = our_code(record, seen.code)
            # No container: its log was deleted with the pod.
            exits[seen.node_rank] = ContainerExit(seen.pod, seen.node_rank, "", code, finished_at=event_time(event))
    return list(exits.values())


def related_exits(record: Record, exits: list[ContainerExit]) -> list[ContainerExit]:
    """Exits that may have one cause: peers notice a failure within the timeouts. Earlier exits are dropped."""
    timeouts = record.config.distributed
    within = max(timeouts.timeout_sec, timeouts.join_timeout_sec, timeouts.master_ready_timeout_sec) + MARGIN_SEC
    newest = max((_timestamp(each) for each in exits if each.finished_at), default=0.0)
    related = []
    for each in exits:
        if not each.finished_at or each.is_running or newest - _timestamp(each) <= within:
            related.append(each)
    return related


def _timestamp(exit_: ContainerExit) -> float:
    return datetime.fromisoformat(f"{exit_.finished_at[:19]}+00:00").timestamp()


def _pod_exits(record: Record, index: int, pod: Object) -> Iterable[ContainerExit]:
    container = current_container(pod, record.kind.container)
    state, last, _ = container_state(pod, record.kind.container)
    status = pod.get("status") or {}
    disruption = find_condition(pod, "DisruptionTarget") or {}
    base = ContainerExit(
        pod=pod["metadata"]["name"],
        index=index,
        container=container.get("name", record.kind.container),
        code=0,
        pod_reason=status.get("reason") or "",
        pod_message=status.get("message") or "",
        node=(pod.get("spec") or {}).get("nodeName") or "",
        disruption=disruption.get("reason") or "",
        disruption_message=disruption.get("message") or "",
    )
    if "running" in state and record.kind.pods_idle_at_end and final_code(record, pod) is None:
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
