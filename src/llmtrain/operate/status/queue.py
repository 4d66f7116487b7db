"""Kueue's view of a queued run: the conditions of its Workload, and whether the queue exists."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from llmtrain.core.redact import redacted_line
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.kubernetes.api_errors import KindNotFound
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.launch.record import Record

API_VERSIONS = ("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1")
GATED = "SchedulingGated"
"""Reason of a waiting pod of a kind that Kueue cannot suspend: it gates the pods instead."""
_CONDITIONS = ("QuotaReserved", "Evicted", "Preempted", "Admitted")


@dataclass(frozen=True)
class QueueState:
    """State of a run with launch.queue."""

    waits_for: str | None = None
    """Kueue's message why the run is not admitted; None if it is admitted or there is no message yet."""
    conditions: tuple[str, ...] = ()
    """Relevant conditions of its Workload, one line each."""
    has_queue: bool | None = None
    """Whether the LocalQueue exists; None if unknown."""
    unseen: str | None = None
    """What could not be read, and why."""
    has_workload: bool = True
    """Whether Kueue has created a Workload for the job, which it does at once if it accepts it."""
    is_active: bool = True
    """False if a user has deactivated the Workload: Kueue evicts it and does not admit it again."""


NOT_QUEUED = QueueState()


def find_queue_state(cluster: Cluster, record: Record, job: Object) -> QueueState:
    """Lists all Workloads of the namespace, because their names end in a hash and they have no run label."""
    try:
        version, workloads = _workloads(cluster, record.namespace)
    except KindNotFound:  # Kueue is not installed
        return NOT_QUEUED
    except UsageError as refused:
        return QueueState(unseen=refused.what)
    workload = next((workload for workload in workloads if _belongs_to(record, job, workload)), None)
    if workload is None:
        return QueueState(has_workload=False)
    state = queue_state(workload)
    queue = record.config.launch.queue
    if state.waits_for is None or queue is None:
        return state
    try:
        has_queue = cluster.get(version, "LocalQueue", queue, record.namespace) is not None
    except LlmtrainError:  # not allowed to read it
        return state
    return replace(state, has_queue=has_queue)


def queue_state(workload: Object) -> QueueState:
    conditions: list[Object] = (workload.get("status") or {}).get("conditions") or []
    waits_for = None
    lines = []
    for row in conditions:
        if row["type"] not in _CONDITIONS or not row.get("message"):
            continue
        # Evicted and Preempted stay False forever once the run was admitted again.
        if row["type"] in ("Evicted", "Preempted") and row["status"] != "True":
            continue
        message = redacted_line(row["message"])
        lines.append(f"Condition {row['type']}={row['status']} of the Workload: {row.get('reason', '')}: {message}")
        if waits_for is None and (row["type"], row["status"]) == ("QuotaReserved", "False"):
            waits_for = message
    is_active = (workload.get("spec") or {}).get("active", True) is not False
    return QueueState(waits_for, tuple(lines), is_active=is_active)


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
    return record.kind.pods_own_queue_entry and is_workload_name(record, meta["name"])


def is_workload_name(record: Record, name: str) -> bool:
    """Whether Kueue gives this name to the Workload of the run's job: kind, name, and a hash."""
    pattern = rf"{record.kind.object_kind.lower()}-{re.escape(record.run_id)}-[0-9a-f]{{5}}"
    return re.fullmatch(pattern, name) is not None
