"""Exit reports in the run directory, for deleted pods: operators delete pods on a restart, and the termination message
with them. Reading the volume takes a pod and some seconds, so it is done only if nothing else explains the exit."""

import json
from contextlib import suppress
from dataclasses import replace

from llmtrain.errors import ExitCode, LlmtrainError
from llmtrain.kubernetes.client import Object
from llmtrain.launch.pod_scripts.file_server import ANY
from llmtrain.launch.record import Record
from llmtrain.operate.fetch.reader import FileRequest, reader_pod
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.container_exits import ContainerExit
from llmtrain.runs.exit_report import ExitReport, parse_report

MAX_READ = 32
_DIRECTORY = "exits/"
_REPORTED = (
    ExitCode.PROBLEM,
    ExitCode.USAGE,
    ExitCode.FAILED,
    ExitCode.UNAVAILABLE,
    ExitCode.INTERRUPTED,
)  # a killed process writes none


def needs_run_reports(record: Record, job: Object | None, exits: list[ContainerExit]) -> bool:
    """Whether pods that exited were deleted and their reports are unknown."""
    if record.task.mode != "train" or job is None:
        return False
    if exits:
        return any(each.is_pod_deleted and each.report is None and each.code in _REPORTED for each in exits)
    return bool((job.get("status") or {}).get("restarts"))  # a JobSet replaces all its pods


def add_run_reports(run: ObservedRun, exits: list[ContainerExit]) -> list[ContainerExit]:
    """The exits with the reports of this launch in the run directory."""
    since = str((run.job or {}).get("metadata", {}).get("creationTimestamp", ""))
    newest: dict[str, ExitReport] = {}
    for report in read_run_reports(run):
        if report.time >= since and report.exit_code:
            newest[report.pod] = report
    if not exits:
        return [_exit_of(run.record, report) for report in newest.values()]
    completed = []
    for each in exits:
        if each.is_pod_deleted:
            each = replace(each, run_report=newest.get(each.pod))
        completed.append(each)
    return completed


def read_run_reports(run: ObservedRun) -> list[ExitReport]:
    """Oldest first; empty if the volume cannot be read."""
    reports = []
    try:
        with reader_pod(run) as reader:
            names = [file.path for file in reader.files(_DIRECTORY) if file.path.endswith(".json")]
            newest = sorted(names)[-MAX_READ:]  # the names begin with the time
            for _, blocks in reader.read_many([FileRequest(name, 0, ANY) for name in newest]):
                with suppress(ValueError, RecursionError):  # damaged
                    report = parse_report(json.loads(b"".join(blocks)))
                    if report is not None:
                        reports.append(report)
    except LlmtrainError:  # not allowed to create pods, or the pod is unschedulable
        return []
    return reports


def _exit_of(record: Record, report: ExitReport) -> ContainerExit:
    index = report.node_rank
    if index is None:
        index = (report.rank or 0) // record.config.launch.processes_per_node
    code = report.exit_code or 0
    return ContainerExit(report.pod, index, "", code, finished_at=report.time, node=report.node, run_report=report)
