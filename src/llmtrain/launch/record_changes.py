"""Changes of a run's record, its ConfigMap, with optimistic locking: a change is refused if another command has changed
the record since it was read."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.kubernetes.labels import ATTEMPT, DELETED_AT, ENDED_AS, STOPPED_AT, belongs_to_run
from llmtrain.kubernetes.server_clock import server_now
from llmtrain.launch.job import Manifest, config_map_name
from llmtrain.launch.objects import Undo, uid_of
from llmtrain.launch.record import Record, is_same_launch, read_record


class RunChanged(UsageError):
    """Another command changed the run in the meantime."""

    def __init__(self, cluster: Cluster, record: Record) -> None:
        super().__init__(
            f"Run '{record.run_id}' was launched, resumed, stopped or deleted by another command in the meantime.",
            remedy="Objects of the other command were not changed. Check the run: "
            f"llmtrain status {record.run_id}{cluster.place(record.namespace)}",
        )


def find_same_launch(cluster: Cluster, record: Record) -> Object:
    """The ConfigMap of the run; refused if it belongs to another launch by now. It may have been stopped."""
    found = cluster.get("v1", "ConfigMap", config_map_name(record.run_id), record.namespace)
    if found is None or not belongs_to_run(found, record.run_id) or not is_same_launch(found, record):
        raise RunChanged(cluster, record)
    return found


def find_unchanged(cluster: Cluster, record: Record) -> Object:
    """The ConfigMap of the run; refused also if another command has begun to stop, resume or delete the run."""
    found = find_same_launch(cluster, record)
    annotations = found["metadata"].get("annotations") or {}
    expected = (record.stopped_at, record.deleted_at, record.attempt)
    if (annotations.get(STOPPED_AT), annotations.get(DELETED_AT), annotations.get(ATTEMPT)) != expected:
        raise RunChanged(cluster, record)
    return found


def replace_record(cluster: Cluster, record: Record, config_map: Manifest, undo: Undo) -> Record:
    """Replace the record by that of a new launch."""
    before = find_unchanged(cluster, record)
    attempt = new_attempt()
    undo.append(partial(_restore, cluster, record, before, attempt))
    annotations = {STOPPED_AT: None, ENDED_AS: None, ATTEMPT: attempt}
    change = {"data": config_map["data"], "metadata": {"annotations": annotations}}
    return read_record(_patch(cluster, record, before, change))


def begin_removal(cluster: Cluster, record: Record, annotations: dict[str, str]) -> None:
    """Annotate the record before objects are removed: a launch in progress then fails, so all objects can be seen."""
    cluster.check_right("delete", record.manifests[-1])
    annotate(cluster, record, annotations)


def annotate(cluster: Cluster, record: Record, annotations: dict[str, str]) -> None:
    """Annotate the record of this launch, retrying if another command annotates it at the same time."""
    while True:
        found = find_same_launch(cluster, record)
        with suppress(RunChanged):
            _patch(cluster, record, found, {"metadata": {"annotations": annotations}})
            return


def delete_record(cluster: Cluster, record: Record) -> None:
    found = find_same_launch(cluster, record)
    name = config_map_name(record.run_id)
    version = found["metadata"].get("resourceVersion")
    with _refuse_conflict(cluster, record):
        cluster.delete("v1", "ConfigMap", name, record.namespace, uid=uid_of(found), resource_version=version)


def new_attempt() -> str:
    return secrets.token_hex(8)


def timestamp() -> str:
    """The API server's time, as Kubernetes writes it."""
    return server_now().strftime("%Y-%m-%dT%H:%M:%SZ")


def _restore(cluster: Cluster, record: Record, before: Object, attempt: str) -> None:
    """Restore the previous record if this attempt has replaced it and no other command has changed it since."""
    found = cluster.get("v1", "ConfigMap", config_map_name(record.run_id), record.namespace)
    if found is None:
        return
    annotations = found["metadata"].get("annotations") or {}
    if annotations.get(ATTEMPT) != attempt or STOPPED_AT in annotations:
        return
    previous = before["metadata"].get("annotations")
    if previous:
        previous = {ATTEMPT: None, **previous}  # null removes that of this attempt
    change = {"data": before["data"], "metadata": {"annotations": previous}}
    _patch(cluster, record, found, change)


def _patch(cluster: Cluster, record: Record, found: Object, change: Object) -> Object:
    meta = {**change.get("metadata", {}), "resourceVersion": found["metadata"].get("resourceVersion")}
    name = config_map_name(record.run_id)
    with _refuse_conflict(cluster, record):
        patched = cluster.patch("v1", "ConfigMap", name, record.namespace, {**change, "metadata": meta})
    if patched is None:
        raise RunChanged(cluster, record)
    return patched


@contextmanager
def _refuse_conflict(cluster: Cluster, record: Record) -> Iterator[None]:
    try:
        yield
    except LlmtrainError as problem:
        if problem.details.get("status") != "HTTP 409":
            raise
        raise RunChanged(cluster, record) from None
