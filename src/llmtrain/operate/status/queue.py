"""Kueue's view of a queued run: the conditions of its Workload, and whether the queue exists."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.kubernetes.api_errors import KindNotFound
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.launch.record import Record
from llmtrain.redact import redacted_line

API_VERSIONS = ("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1")
GATED = "SchedulingGated"
"""Reason of a waiting pod of a StatefulSet: Kueue cannot suspend that kind and gates its pods instead."""
_CONDITIONS = ("QuotaReserved", "Evicted", "Preempted", "Admitted")


@dataclass(frozen=True)
class QueueState:
    """Of a run with launch.queue."""

    waits_for: str | None = None
    """Kueue's message why the run is not admitted; None if it is admitted or there is no message yet."""
    conditions: tuple[str, ...] = ()
    """Relevant conditions of its Workload, one line each."""
    has_queue: bool | None = None
    """Whether the LocalQueue exists; None if unknown."""
    unseen: str | None = None
    """What could not be read, and why."""


NOT_QUEUED = QueueState()


def find_queue_state(cluster: Cluster, record: Record, job: Object) -> QueueState:
    """Lists all Workloads of the namespace, because their names end in a hash and they have no run label."""
    try:
        version, workloads = _workloads(cluster, record.namespace)
    except KindNotFound:  # Kueue is not installed
        return NOT_QUEUED
    except UsageError as refused:
        return QueueState(unseen=refused.what)
    state = queue_state(next((workload for workload in workloads if _belongs_to(record, job, workload)), None))
    queue = record.config.launch.queue
    if state.waits_for is None or queue is None:
        return state
    try:
        has_queue = cluster.get(version, "LocalQueue", queue, record.namespace) is not None
    except LlmtrainError:  # not allowed to read it
        return state
    return QueueState(state.waits_for, state.conditions, has_queue)


def queue_state(workload: Object | None) -> QueueState:
    conditions: list[Object] = ((workload or {}).get("status") or {}).get("conditions") or []
    rows = [row for row in conditions if row["type"] in _CONDITIONS and row.get("message")]
    # Evicted and Preempted stay False forever once the run was admitted again.
    rows = [row for row in rows if row["type"] in ("QuotaReserved", "Admitted") or row["status"] == "True"]
    refused = next((row for row in rows if (row["type"], row["status"]) == ("QuotaReserved", "False")), None)
    lines = (
        f"Condition {row['type']}={row['status']} of the Workload: {row.get('reason', '')}: "
        f"{redacted_line(row['message'])}"
        for row in rows
    )
    return QueueState(redacted_line(refused["message"]) if refused else None, tuple(lines))


def _workloads(cluster: Cluster, namespace: str) -> tuple[str, list[Object]]:
    try:
        return API_VERSIONS[0], cluster.find(API_VERSIONS[0], "Workload", namespace)
    except KindNotFound:
        return API_VERSIONS[1], cluster.find(API_VERSIONS[1], "Workload", namespace)


def _belongs_to(record: Record, job: Object, workload: Object) -> bool:
    meta = workload["metadata"]
    owners: Iterable[Object] = meta.get("ownerReferences") or ()
    if any(owner.get("uid") == job["metadata"]["uid"] for owner in owners):
        return True
    # The Workload of a StatefulSet is owned by its pods.
    name = rf"{record.workload.kind.lower()}-{re.escape(record.run_id)}-[0-9a-f]{{5}}"
    return record.config.launch.kind == "stateful_set" and re.fullmatch(name, meta["name"]) is not None
