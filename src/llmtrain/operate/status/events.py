"""Kubernetes events of a run. They are kept for about an hour and may not be readable, so they are optional to all
callers."""

import re
from collections.abc import Iterable

from llmtrain.errors import UsageError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.launch.record import Record

# Suffixes of the run id in object names: of a Job inside a JobSet or TrainJob, and of pods (Jobs add a random part).
_NAME_SUFFIX = re.compile(r"(-(node|worker|master))?((-\d+){1,2}(-[a-z0-9]{5})?)?")
_KINDS = ("Job", "JobSet", "Pod", "PyTorchJob", "StatefulSet", "TrainJob")


def find_events(cluster: Cluster, namespace: str | None, only_warnings: bool = False) -> list[Object]:
    """Events of one namespace or of all; empty if they may not be read."""
    try:
        return cluster.find("v1", "Event", namespace, fields={"type": "Warning"} if only_warnings else None)
    except UsageError:
        return []


def refusal(record: Record, job: Object, events: Iterable[Object]) -> str | None:
    """Message of the newest event that says why the job's pods cannot be created."""
    failures = [
        event
        for event in events
        if event.get("reason", "").startswith("FailedCreate")
        and is_about(record, event, exclude=("Pod",))
        and event_time(event) >= job["metadata"]["creationTimestamp"]
    ]
    newest = max(failures, key=event_time, default=None)
    return None if newest is None else str(newest.get("message", ""))


def had_job(record: Record, events: Iterable[Object]) -> bool:
    """Whether there are events of the run's job, which prove that it existed."""
    return any(is_about(record, event) and event_time(event) >= record.launched_at for event in events)


def is_about(record: Record, event: Object, exclude: tuple[str, ...] = ()) -> bool:
    """Whether the event is about the run's job or its pods."""
    involved = event.get("involvedObject") or {}
    name, kind = str(involved.get("name", "")), involved.get("kind")
    return (
        kind in _KINDS
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
