"""The life of a run on the cluster: submit, resume, stop, delete.

Objects are created in order, the ConfigMap first: the command that creates it owns the name of the run. A launch that
fails deletes what it created. Objects of others are never changed, and data is only deleted by `delete --data`.

Concurrent commands are ordered by the record. Each one changes the record first, which fails if another command has
changed it since it was read. Objects are deleted by uid, read while the record still belonged to the same launch. A
launch reads its record again after its last object was created, and deletes its objects if another command came first.
"""

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from llmtrain.errors import ClusterError, UsageError
from llmtrain.kubernetes.api_errors import AlreadyExists, Forbidden
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.kubernetes.labels import (
    APP_LABEL,
    ATTEMPT,
    CODE_LABEL,
    DELETED_AT,
    ENDED_AS,
    LAUNCH_ANNOTATION,
    READER_LABEL,
    STOPPED_AT,
    belongs_to_run,
    has_labels,
)
from llmtrain.launch.job import JobPlan, Manifest
from llmtrain.launch.kinds.base import find_kind
from llmtrain.launch.manifests import render
from llmtrain.launch.objects import (
    OVERDUE_SEC,
    create_object,
    delete_object,
    find_object,
    find_objects,
    is_overdue,
    is_owned_by_job,
    is_terminating,
    name_taken,
    object_key,
    uid_of,
    undo_on_error,
)
from llmtrain.launch.pod import GRACE_MARGIN_SEC, pod_template
from llmtrain.launch.record import Record, read_record
from llmtrain.launch.record_changes import (
    annotate,
    begin_removal,
    delete_record,
    find_same_launch,
    find_unchanged,
    new_attempt,
    replace_record,
    timestamp,
)
from llmtrain.launch.volumes import check_claims_exist, check_claims_match

KEPT_KINDS = ("ConfigMap", "PersistentVolumeClaim")  # the record and the data outlive the job
POLL_SEC = 1.0
DELETION_SEC = 60.0  # to wait for an object that is being deleted
OnWait = Callable[[list[Object]], None]
"""Called repeatedly with the pods that still exist."""


def check_on_server(cluster: Cluster, plan: JobPlan) -> list[str]:
    """Let the API server validate every manifest (server-side dry run). Returns what could not be checked."""
    check_claims_exist(cluster, plan)
    unchecked = find_kind(plan.launch).unchecked
    skipped = []
    for manifest in render(plan):
        reason = unchecked.get(manifest["kind"])
        if reason:
            skipped.append(f"{manifest['kind']} {manifest['metadata']['name']}: not checked, {reason}")
        else:
            cluster.create(manifest, dry_run=True)
    return [*skipped, *_check_pod(cluster, plan)]


def _check_pod(cluster: Cluster, plan: JobPlan) -> list[str]:
    """Check one pod: a quota or Pod Security refuses pods only after the job was accepted."""
    template = pod_template(plan, "Never")
    meta = {**template["metadata"], "name": f"{plan.run_id}-dry-run", "namespace": plan.namespace}
    try:
        cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]}, dry_run=True)
    except Forbidden as refused:  # the controller that creates the pods is allowed to
        return [f"Pods: not checked. {refused.what}"]
    return []


def submit(cluster: Cluster, plan: JobPlan, keep_data: bool = False) -> None:
    """Create all objects of a new run; refused if one of them exists. `keep_data`: existing claims of an earlier run of
    this name are used."""
    check_claims_exist(cluster, plan)
    if keep_data:
        check_claims_match(cluster, plan)
    manifests = render(plan)
    existing = {}
    for manifest in manifests:
        found = find_object(cluster, manifest)
        if found is not None:
            existing[object_key(manifest)] = found
    for found in existing.values():
        is_data = found["kind"] == "PersistentVolumeClaim" or has_labels(found, CODE_LABEL)
        is_kept = keep_data and is_data and belongs_to_run(found, plan.run_id)
        if not is_kept or is_terminating(found):
            raise name_taken(cluster, found, plan)
    if existing:  # the run on these volumes must not take it for an earlier launch
        plan = replace(plan, nonce=secrets.token_hex(3))
        manifests = render(plan)
    config_map, *others = [manifest for manifest in manifests if object_key(manifest) not in existing]
    with undo_on_error() as undo:
        record = read_record(create_object(cluster, config_map, plan.run_id, undo))
        for manifest in others:
            create_object(cluster, manifest, plan.run_id, undo)
        find_unchanged(cluster, record)


def resume(cluster: Cluster, record: Record, plan: JobPlan, on_wait: OnWait | None = None) -> list[str]:
    """Launch an ended run again (the caller checks that it has ended): its job is recreated, its record and its data
    are kept. Whatever would prevent the launch is checked before anything is deleted. Returns old pods that remain."""
    if record.deleted_at:
        raise UsageError(
            f"Run '{record.run_id}' is being deleted with its data since {record.deleted_at}.",
            remedy=f"Finish the deletion: llmtrain delete {record.run_id} --data{cluster.place(record.namespace)}",
        )
    plan = replace(plan, number=record.number + 1, nonce=record.nonce, run_label=record.run_label)
    manifests = render(plan)
    check_claims_exist(cluster, plan)
    check_claims_match(cluster, plan, record.config.launch)
    for manifest in manifests:
        found = find_object(cluster, manifest)
        if found is not None and not belongs_to_run(found, plan.run_id) and not is_owned_by_job(found, plan.run_id):
            raise name_taken(cluster, found, plan)
        if found is None and has_labels(manifest, CODE_LABEL) and not (plan.code and plan.code.contents):
            raise UsageError(
                f"ConfigMap {manifest['metadata']['name']}, which had the code of run '{plan.run_id}', is gone.",
                remedy="Pass the code again with --with-code.",
            )
        if found is None or manifest["kind"] not in KEPT_KINDS:
            cluster.check_right("create", manifest)
    cluster.check_right("delete", record.manifests[-1])
    remaining = remove_job(cluster, record, on_wait)
    with undo_on_error() as undo:
        resumed = replace_record(cluster, record, manifests[0], undo)
        for manifest in manifests[1:]:
            found = _wait_for_deletion(cluster, manifest, plan)
            if found is not None and manifest["kind"] not in KEPT_KINDS:  # of an interrupted or overtaken launch
                delete_object(cluster, manifest, plan.run_id, uid_of(found))
                found = _wait_for_deletion(cluster, manifest, plan)
            if found is None:
                create_object(cluster, manifest, plan.run_id, undo)
        find_unchanged(cluster, resumed)
    if record.code not in (None, plan.code):
        _delete_code(cluster, record)
    return remaining


def _delete_code(cluster: Cluster, record: Record) -> None:
    """Delete the ConfigMap with the code of this launch."""
    code = [manifest for manifest in record.manifests if has_labels(manifest, CODE_LABEL)]
    _delete_found(cluster, record, code, find_objects(cluster, code))


def _wait_for_deletion(cluster: Cluster, manifest: Manifest, plan: JobPlan) -> Object | None:
    """The existing object of the run. One that is being deleted, or that is deleted with the old job, is awaited."""
    deadline = time.monotonic() + DELETION_SEC
    while True:
        found = find_object(cluster, manifest)
        if found is None or (belongs_to_run(found, plan.run_id) and not is_terminating(found)):
            return found
        if not is_terminating(found) and not is_owned_by_job(found, plan.run_id):
            raise name_taken(cluster, found, plan)
        if time.monotonic() > deadline:
            raise AlreadyExists(
                f"{found['kind']} {found['metadata']['name']} in namespace {plan.namespace} is still being deleted.",
                remedy="Check its finalizers, and retry when it is gone.",
            )
        time.sleep(POLL_SEC)


def stop(cluster: Cluster, record: Record, on_wait: OnWait, ended_as: str | None = None) -> list[str]:
    """Delete the job, so that its pods save a checkpoint and end, and everything but the record and the data. Returns
    pods that remain after their grace period: their node is unreachable. `ended_as`: the run had ended before."""
    notes = {STOPPED_AT: timestamp()}
    if ended_as:
        notes[ENDED_AS] = ended_as
    begin_removal(cluster, record, notes)
    remaining = remove_job(cluster, record, on_wait)
    find_same_launch(cluster, record)
    return remaining


def delete(cluster: Cluster, record: Record, data: bool, on_wait: OnWait) -> list[str]:
    """Delete all objects of a run, its record last, and its claims only if `data` is set. Returns pods that remain."""
    begin_removal(cluster, record, {ATTEMPT: new_attempt()})
    remaining = remove_job(cluster, record, on_wait)
    # A `fetch` that was killed leaves its reader pod behind.
    for pod in cluster.find("v1", "Pod", record.namespace, {**APP_LABEL, READER_LABEL: record.run_id}):
        cluster.delete("v1", "Pod", pod["metadata"]["name"], record.namespace)
    _delete_code(cluster, record)
    if data:
        claims = _created_claims(cluster, record)
        objects = find_objects(cluster, claims)
        # A run that has lost part of its data cannot be resumed, so the record says so first.
        annotate(cluster, record, {DELETED_AT: timestamp()})
        _delete_found(cluster, record, claims, objects)
    delete_record(cluster, record)
    return remaining


def _created_claims(cluster: Cluster, record: Record) -> list[Manifest]:
    """Claims that were created for the run, also by an earlier launch that used another volume than the last one."""
    claims = {}
    for manifest in record.manifests:
        if manifest["kind"] == "PersistentVolumeClaim":
            claims[manifest["metadata"]["name"]] = manifest
    with suppress(UsageError):  # not allowed to list claims
        for found in cluster.find("v1", "PersistentVolumeClaim", record.namespace, record.selector):
            metadata = {"name": found["metadata"]["name"], "namespace": record.namespace}
            claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata}
            claims.setdefault(metadata["name"], claim)
    return list(claims.values())


def take_back(cluster: Cluster, record: Record) -> list[str]:
    """Delete all objects of a first launch that cannot start. Claims are kept if an earlier launch created them, or if
    a container has run and may have written to them. Returns the names of the claims that are kept."""
    begin_removal(cluster, record, {ATTEMPT: new_attempt()})
    objects = find_objects(cluster, record.manifests)
    find_same_launch(cluster, record)
    has_run = _has_run(cluster, record)
    claims = {key: found for key, found in objects.items() if found["kind"] == "PersistentVolumeClaim"}
    kept = {}
    for key, claim in claims.items():
        annotations = claim["metadata"].get("annotations") or {}
        is_earlier = annotations.get(LAUNCH_ANNOTATION) != record.plan.launch_id
        if has_run or is_earlier:
            kept[key] = claim
    if len(kept) < len(claims):  # from here on it cannot be resumed
        annotate(cluster, record, {DELETED_AT: timestamp()})
    _, *manifests = record.manifests  # the record is deleted last
    removed = [manifest for manifest in reversed(manifests) if object_key(manifest) not in kept]
    _delete_found(cluster, record, removed, objects)
    delete_record(cluster, record)
    return [claim["metadata"]["name"] for claim in kept.values()]


def _has_run(cluster: Cluster, record: Record) -> bool:
    """Whether a container of the run has started, and may have written to its volumes."""
    for pod in cluster.find("v1", "Pod", record.namespace, record.selector):
        for status in pod.get("status", {}).get("containerStatuses") or []:
            state = status.get("state", {})
            if "running" in state or "terminated" in state or status.get("restartCount"):
                return True
    return False


def _delete_found(cluster: Cluster, record: Record, manifests: list[Manifest], objects: dict[str, Object]) -> None:
    """Delete those of the manifests that were found, by uid."""
    for manifest in manifests:
        found = objects.get(object_key(manifest))
        if found is not None:
            delete_object(cluster, manifest, record.run_id, uid_of(found))


def remove_job(cluster: Cluster, record: Record, on_wait: OnWait | None = None) -> list[str]:
    """Delete the job, wait for its pods, which save a checkpoint first, then delete the objects around it; never those
    of a later launch. Returns pods that remain."""
    manifests = [manifest for manifest in record.manifests if manifest["kind"] not in KEPT_KINDS]
    objects = find_objects(cluster, manifests)
    find_same_launch(cluster, record)
    jobs = [manifest for manifest in manifests if manifest["kind"] == record.kind.object_kind]
    others = [manifest for manifest in manifests if manifest["kind"] != record.kind.object_kind]
    _delete_found(cluster, record, jobs, objects)
    remaining = _wait_for_pods(cluster, record, on_wait)
    _delete_found(cluster, record, list(reversed(others)), objects)
    return remaining


def _wait_for_pods(cluster: Cluster, record: Record, on_wait: OnWait | None) -> list[str]:
    """Wait until all pods are gone, except those on unreachable nodes. Tolerates an API server that is unavailable for
    a while."""
    grace_sec = record.config.launch.grace_period_sec + GRACE_MARGIN_SEC
    deadline = time.monotonic() + grace_sec + OVERDUE_SEC
    while True:
        try:
            pods = cluster.find("v1", "Pod", record.namespace, record.selector)
            find_same_launch(cluster, record)  # else the pods may belong to a later launch
        except ClusterError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SEC)
            continue
        if all(is_overdue(pod) for pod in pods) or time.monotonic() > deadline:
            return [pod["metadata"]["name"] for pod in pods]
        if on_wait:
            on_wait(pods)
        time.sleep(POLL_SEC)
