"""What Kueue says of a run that waits in a queue: the conditions of its Workload, and whether the queue exists."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.kubernetes.api_errors import KindNotFound, one_line
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.launch.record import Record

API_VERSIONS = ("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1")
GATED = "SchedulingGated"
"""Why a pod of a StatefulSet waits: Kueue cannot suspend that kind, and holds its pods back instead."""
_TOLD = ("QuotaReserved", "Evicted", "Preempted", "Admitted")


@dataclass(frozen=True)
class QueueState:
    """Of a run whose config names a queue."""

    waits_for: str | None = None
    """Why it is not admitted, in Kueue's words; None: it is, or nothing says so yet."""
    conditions: tuple[str, ...] = ()
    """Those of its Workload that say something, as lines."""
    has_queue: bool | None = None
    """Whether the LocalQueue exists; None: not known."""
    unseen: str | None = None
    """What we may not read."""


NOT_QUEUED = QueueState()


def find_queue_state(cluster: Cluster, record: Record, job: Object) -> QueueState:
    """Asks for all Workloads of the namespace: their names end in a hash, and they carry no label of ours."""
    try:
        version, workloads = _workloads(cluster, record.namespace)
    except KindNotFound:  # Kueue is not installed
        return NOT_QUEUED
    except UsageError as refused:
        return QueueState(unseen=refused.what)
    found = queue_state(next((row for row in workloads if _is_of(record, job, row)), None))
    queue = record.config.launch.queue
    if found.waits_for is None or queue is None:
        return found
    try:
        has_queue = cluster.get(version, "LocalQueue", queue, record.namespace) is not None
    except LlmtrainError:  # not allowed to look
        return found
    return QueueState(found.waits_for, found.conditions, has_queue)


def queue_state(workload: Object | None) -> QueueState:
    rows: list[Object] = ((workload or {}).get("status") or {}).get("conditions") or []
    told = [row for row in rows if row["type"] in _TOLD and row.get("message")]
    # Evicted and Preempted stay False for good once it was admitted again.
    told = [row for row in told if row["type"] in ("QuotaReserved", "Admitted") or row["status"] == "True"]
    refused = next((row for row in told if (row["type"], row["status"]) == ("QuotaReserved", "False")), None)
    lines = (
        f"Condition {row['type']}={row['status']} of the Workload: {row.get('reason', '')}: {one_line(row['message'])}"
        for row in told
    )
    return QueueState(one_line(refused["message"]) if refused else None, tuple(lines))


def _workloads(cluster: Cluster, namespace: str) -> tuple[str, list[Object]]:
    try:
        return API_VERSIONS[0], cluster.find(API_VERSIONS[0], "Workload", namespace)
    except KindNotFound:
        return API_VERSIONS[1], cluster.find(API_VERSIONS[1], "Workload", namespace)


def _is_of(record: Record, job: Object, workload: Object) -> bool:
    meta = workload["metadata"]
    owners: Iterable[Object] = meta.get("ownerReferences") or ()
    if any(owner.get("uid") == job["metadata"]["uid"] for owner in owners):
        return True
    # Of a StatefulSet its pods are the owners.
    wanted = rf"{record.workload.kind.lower()}-{re.escape(record.run_id)}-[0-9a-f]{{5}}"
    return record.config.launch.kind == "stateful_set" and re.fullmatch(wanted, meta["name"]) is not None
