"""Kubernetes events of a run. They are kept for about an hour and may not be readable, so they are optional to all
callers."""

import re
from collections.abc import Collection, Iterable

from llmtrain.errors import UsageError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.launch.kinds.base import all_kinds
from llmtrain.launch.record import Record

# Suffixes of the run id in object names: of a Job inside a JobSet or TrainJob, and of pods (Jobs add a random part).
_NAME_SUFFIX = re.compile(r"(-(node|worker|master))?((-\d+){1,2}(-[a-z0-9]{5})?)?")
MISSING_OBJECT = re.compile(r"(?i)(secret|configmap) \S+ not found|(references )?non-existent (secret|config) key")
"""Matches messages about pods: a Secret or ConfigMap, or one of its keys, does not exist."""


def find_events(cluster: Cluster, namespace: str | None, only_warnings: bool = False) -> list[Object]:
    """Events of one namespace or of all; empty if they may not be read."""
    fields = {"type": "Warning"} if only_warnings else None
    try:
        return cluster.find("v1", "Event", namespace, fields=fields)
    except UsageError:
        return []


def refusal(record: Record, job: Object, events: Iterable[Object]) -> str | None:
    """Message of the newest event that says why the job's pods cannot be created."""
    failures = []
    for event in events:
        is_refusal = event.get("reason", "").startswith("FailedCreate") and is_about(record, event, exclude=("Pod",))
        if is_refusal and event_time(event) >= job["metadata"]["creationTimestamp"]:
            failures.append(event)
    return _newest_message(failures)


def failed_mount(record: Record, pods: Collection[str], events: Iterable[Object]) -> str | None:
    """Message of the newest event that says that a Secret or ConfigMap which these pods mount does not exist."""
    failures = []
    for event in events:
        if event.get("reason") != "FailedMount" or not is_about(record, event):
            continue
        if event["involvedObject"]["name"] in pods and MISSING_OBJECT.search(str(event.get("message", ""))):
            failures.append(event)
    return _newest_message(failures)


def _newest_message(events: list[Object]) -> str | None:
    newest = max(events, key=event_time, default=None)
    return None if newest is None else str(newest.get("message", ""))


def had_job(record: Record, events: Iterable[Object]) -> bool:
    """Whether there are events of the run's job, which prove that it existed."""
    return any(is_about(record, event) and event_time(event) >= record.launched_at for event in events)


def is_about(record: Record, event: Object, exclude: tuple[str, ...] = ()) -> bool:
    """Whether the event is about the run's job or its pods."""
    involved = event.get("involvedObject") or {}
    name = str(involved.get("name", ""))
    kind = involved.get("kind")
    return (
        kind in {"Pod", *(each.object_kind for each in all_kinds())}
        and kind not in exclude
        and involved.get("namespace") == record.namespace
        and name.startswith(record.run_id)
        and _NAME_SUFFIX.fullmatch(name.removeprefix(record.run_id)) is not None
    )


def event_time(event: Object) -> str:
    """Time of the last occurrence, in whole seconds like the other timestamps of Kubernetes."""
    series = event.get("series") or {}
    time = event.get("lastTimestamp") or series.get("lastObservedTime") or event.get("eventTime") or ""
    return f"{time[:19]}Z" if time else event["metadata"].get("creationTimestamp", "")
