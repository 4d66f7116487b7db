"""Exit reports in the run directory, for deleted pods: operators delete pods on a restart, and the termination message
with them. Reading the volume takes a pod and some seconds, so it is done only if nothing else explains the exit."""

import json
from dataclasses import replace

from llmtrain.errors import LlmtrainError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.launch.pod_scripts.file_server import ANY
from llmtrain.launch.record import Record
from llmtrain.operate.fetch.reader import FileRequest, reader_pod
from llmtrain.operate.status.container_exits import ContainerExit
from llmtrain.runs.exit_report import ExitReport, parse_report

MAX_READ = 32
_DIRECTORY = "exits/"
_REPORTED = (1, 64, 65, 69, 75)  # a killed process writes none


def needs_run_reports(record: Record, job: Object | None, exits: list[ContainerExit]) -> bool:
    """Whether pods that exited were deleted and their reports are unknown."""
    if record.work.mode != "train" or job is None:
        return False
    if exits:
        return any(each.is_pod_deleted and each.report is None and each.code in _REPORTED for each in exits)
    return bool((job.get("status") or {}).get("restarts"))  # a JobSet replaces all its pods


def add_run_reports(
    cluster: Cluster, record: Record, job: Object | None, exits: list[ContainerExit]
) -> list[ContainerExit]:
    """The exits with the reports of this launch in the run directory."""
    since = str((job or {}).get("metadata", {}).get("creationTimestamp", ""))
    newest: dict[str, ExitReport] = {}
    for report in read_run_reports(cluster, record):
        if report.time >= since and report.exit_code:
            newest[report.pod] = report
    if exits:
        return [replace(each, run_report=newest.get(each.pod)) if each.is_pod_deleted else each for each in exits]
    return [_exit_of(record, report) for report in newest.values()]


def read_run_reports(cluster: Cluster, record: Record) -> list[ExitReport]:
    """Oldest first; empty if the volume cannot be read."""
    reports = []
    try:
        with reader_pod(cluster, record) as reader:
            names = sorted(file.path for file in reader.files(_DIRECTORY) if file.path.endswith(".json"))[-MAX_READ:]
            for _, blocks in reader.read_many([FileRequest(name, 0, ANY) for name in names]):
                try:
                    reports.append(parse_report(json.loads(b"".join(blocks))))
                except (ValueError, RecursionError):
                    continue
    except LlmtrainError:  # not allowed to create pods, or the pod is unschedulable
        return []
    return [report for report in reports if report is not None]


def _exit_of(record: Record, report: ExitReport) -> ContainerExit:
    per_pod = record.config.launch.processes_per_node
    index = report.node_rank if report.node_rank is not None else (report.rank or 0) // per_pod
    code = report.exit_code or 0
    return ContainerExit(report.pod, index, "", code, finished_at=report.time, node=report.node, run_report=report)
