"""Objects of a run on the cluster: find them, create them with an undo, delete them by uid."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.kubernetes.api_errors import AlreadyExists, KindNotFound
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.kubernetes.labels import belongs_to_run
from llmtrain.kubernetes.server_clock import seconds_since
from llmtrain.launch.job import JobPlan, Manifest

RETRY_SEC = 0.5
RUNTIME_SEC = 10.0  # until the operator of a TrainJob sees a runtime that was created just before
OVERDUE_SEC = 30.0  # after the grace period of a pod
Undo = list[Callable[[], object]]


def find_object(cluster: Cluster, manifest: Manifest) -> Object | None:
    meta = manifest["metadata"]
    return cluster.get(manifest["apiVersion"], manifest["kind"], meta["name"], meta["namespace"])


def find_objects(cluster: Cluster, manifests: list[Manifest]) -> dict[str, Object]:
    """The objects that exist, by `object_key`."""
    objects = {}
    for manifest in manifests:
        with suppress(KindNotFound):  # the CRD was removed, and all of its objects with it
            found = find_object(cluster, manifest)
            if found is not None:
                objects[object_key(manifest)] = found
    return objects


def object_key(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def uid_of(found: Object) -> str:
    return str(found["metadata"].get("uid", ""))


def is_terminating(found: Object) -> bool:
    return "deletionTimestamp" in found["metadata"]


def is_owned_by_job(found: Object, run_id: str) -> bool:
    """Whether an operator created it for a job of this name, so that it is deleted with the job."""
    return any(owner.get("name") == run_id for owner in found["metadata"].get("ownerReferences") or [])


def is_overdue(pod: Object) -> bool:
    """Whether a pod should be gone: its grace period is over, and its kubelet has not confirmed that it ended."""
    deleted_at = pod["metadata"].get("deletionTimestamp")
    return deleted_at is not None and seconds_since(deleted_at) > OVERDUE_SEC


def create_object(cluster: Cluster, manifest: Manifest, run_id: str, undo: Undo) -> Object:
    """Create an object and register its deletion in `undo`, also if the response gets lost."""
    undo.append(partial(delete_object, cluster, manifest, run_id))
    deadline = time.monotonic() + RUNTIME_SEC
    while True:
        try:
            created = cluster.create(manifest)
            undo[-1] = partial(delete_object, cluster, manifest, run_id, uid_of(created))
            return created
        except UsageError as refused:
            # Kubeflow Trainer's webhook reads runtimes from a cache.
            if "must be created before the TrainJob" not in refused.what or time.monotonic() > deadline:
                undo.pop()  # nothing was created, or another command created it
                raise
        time.sleep(RETRY_SEC)


def delete_object(cluster: Cluster, manifest: Manifest, run_id: str, uid: str | None = None) -> None:
    """Delete an object of the run, if its uid is `uid`. None deletes whatever has the name."""
    try:
        found = find_object(cluster, manifest)
    except KindNotFound:  # the CRD was removed, and all of its objects with it
        return
    if found is None or not belongs_to_run(found, run_id) or uid not in (None, uid_of(found)):
        return
    meta = manifest["metadata"]
    try:
        cluster.delete(manifest["apiVersion"], manifest["kind"], meta["name"], meta["namespace"], uid=uid_of(found))
    except LlmtrainError as problem:
        if problem.details.get("status") != "HTTP 409":  # it was replaced in the meantime
            raise


@contextmanager
def undo_on_error() -> Iterator[Undo]:
    """Run the registered steps in reverse order if the block fails, also on Ctrl-C."""
    undo: Undo = []
    try:
        yield undo
    except BaseException:
        for step in reversed(undo):
            with suppress(LlmtrainError):  # the first error is the one to report
                step()
        raise


def name_taken(cluster: Cluster, found: Object, plan: JobPlan) -> UsageError:
    """The error for an object that exists and prevents a launch."""
    options = cluster.place(plan.namespace)
    kind = found["kind"]
    name = found["metadata"]["name"]
    if not belongs_to_run(found, plan.run_id):
        return UsageError(
            f"{kind} {name} already exists in namespace {plan.namespace} and does not belong to this run.",
            remedy="Nothing was changed. Use another --name, or delete that object if it is yours.",
        )
    if is_terminating(found):
        return AlreadyExists(
            f"{kind} {name} in namespace {plan.namespace} is still being deleted.", remedy="Retry when it is gone."
        )
    if kind == "PersistentVolumeClaim":
        return AlreadyExists(
            f"Claim {name} of an earlier run '{plan.run_id}' still exists.",
            remedy="Resume that run (--resume), use another --name, or delete the claim: kubectl delete pvc "
            f"{name}{options}",
        )
    return AlreadyExists(
        f"Run '{plan.run_id}' already exists in namespace {plan.namespace}.",
        remedy=f"Check it (llmtrain status {plan.run_id}{options}), resume it (--resume), or use another --name.",
    )
