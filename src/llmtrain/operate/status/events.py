"""What the cluster's events tell of a run. They are kept for an hour or so, and not everybody may read them: whoever
asks must do without them too."""

import re
from collections.abc import Iterable

from llmtrain.errors import UsageError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.launch.record import Record

# What a job makes: itself, a Job inside it (JobSet, TrainJob), pods (of which Jobs give a random ending).
_MADE = re.compile(r"(-(node|worker|master))?((-\d+){1,2}(-[a-z0-9]{5})?)?")
_JOBS = ("Job", "JobSet", "Pod", "PyTorchJob", "StatefulSet", "TrainJob")


def find_events(cluster: Cluster, namespace: str | None, only_warnings: bool = False) -> list[Object]:
    """Events of a namespace, or of all; none where we may not read them."""
    try:
        return cluster.find("v1", "Event", namespace, fields={"type": "Warning"} if only_warnings else None)
    except UsageError:
        return []


def refusal(record: Record, job: Object, events: Iterable[Object]) -> str | None:
    """Why the job's pods are not made, in the cluster's words."""
    refused = [
        event
        for event in events
        if event.get("reason", "").startswith("FailedCreate")
        and is_about(record, event, but=("Pod",))
        and event_time(event) >= job["metadata"]["creationTimestamp"]
    ]
    newest = max(refused, key=event_time, default=None)
    return None if newest is None else str(newest.get("message", ""))


def had_job(record: Record, events: Iterable[Object]) -> bool:
    """Whether something that only a job brings about has happened under the run's name."""
    return any(is_about(record, event) and event_time(event) >= record.launched_at for event in events)


def is_about(record: Record, event: Object, but: tuple[str, ...] = ()) -> bool:
    about = event.get("involvedObject") or {}
    name, kind = str(about.get("name", "")), about.get("kind")
    return (
        kind in _JOBS
        and kind not in but
        and about.get("namespace") == record.namespace
        and name.startswith(record.run_id)
        and _MADE.fullmatch(name.removeprefix(record.run_id)) is not None
    )


def event_time(event: Object) -> str:
    """Its last time, to the second, as all of Kubernetes' times are."""
    series = event.get("series") or {}
    time = event.get("lastTimestamp") or series.get("lastObservedTime") or event.get("eventTime") or ""
    return f"{time[:19]}Z" if time else event["metadata"].get("creationTimestamp", "")
