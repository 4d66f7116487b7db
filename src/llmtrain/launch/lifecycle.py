"""Manifests to the cluster and away again: submit, resume, stop, delete.

Objects are made in order, the ConfigMap first: whoever makes it has the run's name. A launch that fails half-way takes
back what it made. Objects of somebody else are never touched, nor is data, unless `delete` is told to.

Of several commands at once, the record decides. Each that changes a run changes its record first, and only if nobody
else has since it was read. What it removes, it knows by uid, from while the record was still of the same launch. A
launch looks at its record once more when all is made, and takes its objects back if it was overtaken.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from llmtrain.config.launch import SINGLE_NODE_MODES
from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.kubernetes.api_errors import AlreadyThere, Missing, NotAllowed
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.kubernetes.labels import (
    APP_LABEL,
    ATTEMPT,
    DELETED_AT,
    ENDED_AS,
    LAUNCH_ANNOTATION,
    READER_LABEL,
    STOPPED_AT,
    belongs_to_run,
)
from llmtrain.kubernetes.server_clock import seconds_since, server_now
from llmtrain.launch.manifests import render
from llmtrain.launch.plan import JobPlan, Manifest, config_map_name
from llmtrain.launch.pod import GRACE_MARGIN_SEC, pod_template
from llmtrain.launch.record import Record, is_same_launch, read_record
from llmtrain.launch.volumes import check_volumes

KEPT = ("ConfigMap", "PersistentVolumeClaim")  # what outlives the job: who the run is, and its data
CONFIRM_SEC = 1.0
RETRY_SEC = 0.5
OVERDUE_SEC = 30.0  # after its grace period
RUNTIME_SEC = 10.0  # that the operator of a TrainJob may take to see the runtime that was made just before
LEAVE_SEC = 60.0  # that an object may take to go after it was deleted
Waiting = Callable[[list[Object]], None]
"""Told again and again which pods are still there."""


def check_on_server(cluster: Cluster, plan: JobPlan) -> list[str]:
    """Ask the API server to check every manifest, without keeping any. Returns what could not be asked."""
    _check_claims(cluster, plan)
    skipped = []
    for manifest in render(plan):
        if manifest["kind"] == "TrainJob":
            # The webhook looks the runtime up, which a dry run has not made.
            skipped.append(f"{manifest['kind']} {manifest['metadata']['name']}: needs its runtime to be there first")
        else:
            cluster.create(manifest, dry_run=True)
    return [*skipped, *_check_pod(cluster, plan)]


def _check_pod(cluster: Cluster, plan: JobPlan) -> list[str]:
    """A job is accepted whose pods are refused later, by a quota or by the namespace's security rules: ask for one."""
    template = pod_template(plan, "Never")
    name = f"{plan.run_id}-dry-run"
    meta = {**template["metadata"], "name": name, "namespace": plan.namespace}
    try:
        cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]}, dry_run=True)
    except NotAllowed as refused:  # whoever makes the pods has it
        return [f"Its pods: {refused.what}"]
    return []


def submit(cluster: Cluster, plan: JobPlan, keep_data: bool = False) -> None:
    """Make all objects of a new run. Refused where anything of that name is there already; `keep_data`: volumes of an
    earlier run of that name are taken over."""
    _check_claims(cluster, plan)
    if keep_data:
        check_volumes(cluster, plan)
    found = {
        index: there for index, each in enumerate(render(plan)) if (there := find_object(cluster, each)) is not None
    }
    for there in found.values():
        is_kept = keep_data and there["kind"] == "PersistentVolumeClaim" and belongs_to_run(there, plan.run_id)
        if not is_kept or _is_leaving(there):
            raise _taken(cluster, there, plan)
    if found:  # to the run on these volumes this is another launch than any before
        plan = replace(plan, nonce=secrets.token_hex(3))
    config_map, *others = [manifest for index, manifest in enumerate(render(plan)) if index not in found]
    with undoing() as undo:
        record = read_record(_make(cluster, config_map, plan, undo))
        for manifest in others:
            _make(cluster, manifest, plan, undo)
        _find_unchanged(cluster, record)


def resume(cluster: Cluster, record: Record, plan: JobPlan, waiting: Waiting | None = None) -> list[str]:
    """Launch a run again that has ended, which the caller has made sure of: its job is made anew, its record and its
    data are kept. What cannot be made is found out before anything is removed. Returns old pods that do not go."""
    if record.deleted_at:
        raise UsageError(
            f"Run '{record.run_id}' is being deleted with its data, since {record.deleted_at}.",
            remedy=f"Finish that: llmtrain delete {record.run_id} --data{cluster.place(record.namespace)}",
        )
    plan = replace(plan, number=record.number + 1, nonce=record.nonce, run_label=record.run_label)
    manifests = render(plan)
    _check_claims(cluster, plan)
    check_volumes(cluster, plan, record.config.launch)
    for manifest in manifests:
        found = find_object(cluster, manifest)
        if found is not None and not belongs_to_run(found, plan.run_id) and not _is_made_for(found, plan.run_id):
            raise _taken(cluster, found, plan)
        if found is None or manifest["kind"] not in KEPT:
            cluster.check_right("create", manifest)
    cluster.check_right("delete", _job(record))
    left = remove_job(cluster, record, waiting)
    with undoing() as undo:
        again = _change_record(cluster, record, manifests[0], undo)
        for manifest in manifests[1:]:
            found = _find_settled(cluster, manifest, plan)
            if found is not None and manifest["kind"] not in KEPT:  # of a launch that was cut short, or is overtaken
                _delete_ours(cluster, manifest, plan.run_id, _uid(found))
                found = _find_settled(cluster, manifest, plan)
            if found is None:
                _make(cluster, manifest, plan, undo)
        _find_unchanged(cluster, again)
    return left


def _uid(found: Object) -> str:
    return str(found["metadata"].get("uid", ""))


def _find_same(cluster: Cluster, record: Record) -> Object:
    """The ConfigMap of a run, refused where it is of another launch by now. That it was stopped meanwhile is fine."""
    found = cluster.get("v1", "ConfigMap", config_map_name(record.run_id), record.namespace)
    if found is None or not belongs_to_run(found, record.run_id) or not is_same_launch(found, record):
        raise _changed(cluster, record)
    return found


def _find_unchanged(cluster: Cluster, record: Record) -> Object:
    """The same, refused also where another command has begun to stop, resume or delete it."""
    found = _find_same(cluster, record)
    notes = found["metadata"].get("annotations") or {}
    known = (record.stopped_at, record.deleted_at, record.attempt)
    if (notes.get(STOPPED_AT), notes.get(DELETED_AT), notes.get(ATTEMPT)) != known:
        raise _changed(cluster, record)
    return found


def _patch_record(cluster: Cluster, record: Record, found: Object, change: Object) -> Object:
    """Change the ConfigMap that was found, refused where it has changed since."""
    meta = {**change.get("metadata", {}), "resourceVersion": found["metadata"].get("resourceVersion")}
    name = config_map_name(record.run_id)
    with _refused_if_changed(cluster, record):
        after = cluster.patch("v1", "ConfigMap", name, record.namespace, {**change, "metadata": meta})
    if after is None:
        raise _changed(cluster, record)
    return after


@contextmanager
def _refused_if_changed(cluster: Cluster, record: Record) -> Iterator[None]:
    try:
        yield
    except LlmtrainError as problem:
        if problem.details.get("status") != "HTTP 409":
            raise
        raise _changed(cluster, record) from None


def _change_record(cluster: Cluster, record: Record, config_map: Manifest, undo: list[Callable[[], object]]) -> Record:
    """The record of the new launch in place of the old one; refused where it is not the one that was read."""
    before, attempt = _find_unchanged(cluster, record), _new_attempt()
    undo.append(partial(_put_back, cluster, record, before, attempt))
    notes = {STOPPED_AT: None, ENDED_AS: None, ATTEMPT: attempt}
    change = {"data": config_map["data"], "metadata": {"annotations": notes}}
    return read_record(_patch_record(cluster, record, before, change))


def _new_attempt() -> str:
    return secrets.token_hex(8)


def _put_back(cluster: Cluster, record: Record, before: Object, attempt: str) -> None:
    """The record as it was, if this attempt has changed it and nobody has since."""
    found = cluster.get("v1", "ConfigMap", config_map_name(record.run_id), record.namespace)
    notes = (found or {"metadata": {}})["metadata"].get("annotations") or {}
    if found is None or notes.get(ATTEMPT) != attempt or STOPPED_AT in notes:
        return
    old = before["metadata"].get("annotations")
    change = {"data": before["data"], "metadata": {"annotations": old and {ATTEMPT: None, **old}}}
    _patch_record(cluster, record, found, change)


class _Changed(UsageError):
    """Another command came first."""


def _changed(cluster: Cluster, record: Record) -> _Changed:
    return _Changed(
        f"Run '{record.run_id}' was launched, resumed, stopped or deleted by another command in the meantime.",
        remedy="What the other one has made was left alone. See how it is: "
        f"llmtrain status {record.run_id}{cluster.place(record.namespace)}",
    )


def _make(cluster: Cluster, manifest: Manifest, plan: JobPlan, undo: list[Callable[[], object]]) -> Object:
    """Make an object, and remember how to take it back even if the answer gets lost."""
    undo.append(partial(_delete_ours, cluster, manifest, plan.run_id))
    deadline = time.monotonic() + RUNTIME_SEC
    while True:
        try:
            made = cluster.create(manifest)
            undo[-1] = partial(_delete_ours, cluster, manifest, plan.run_id, made["metadata"].get("uid"))
            return made
        except UsageError as refused:
            if "must be created before the TrainJob" not in refused.what or time.monotonic() > deadline:
                undo.pop()  # it was not made, or somebody else made it
                raise
        time.sleep(RETRY_SEC)


def _find_settled(cluster: Cluster, manifest: Manifest, plan: JobPlan) -> Object | None:
    """An object of ours; one that is on its way out, by itself or with the old job, is waited for."""
    deadline = time.monotonic() + LEAVE_SEC
    while True:
        found = find_object(cluster, manifest)
        if found is None or (belongs_to_run(found, plan.run_id) and not _is_leaving(found)):
            return found
        if not _is_leaving(found) and not _is_made_for(found, plan.run_id):
            raise _taken(cluster, found, plan)
        if time.monotonic() > deadline:
            raise AlreadyThere(
                f"{found['kind']} {found['metadata']['name']} in namespace {plan.namespace} is still being deleted.",
                remedy="Something holds it (its finalizers say what). Try again when it is gone.",
            )
        time.sleep(CONFIRM_SEC)


def _is_leaving(found: Object) -> bool:
    return "deletionTimestamp" in found["metadata"]


def _is_made_for(found: Object, run_id: str) -> bool:
    """Whether an operator made it for a job of this name, with which it goes."""
    return any(owner.get("name") == run_id for owner in found["metadata"].get("ownerReferences") or [])


def stop(cluster: Cluster, record: Record, waiting: Waiting, ended_as: str | None = None) -> list[str]:
    """Tell the run to save and stop, wait for its pods, and remove its objects but the record and the data. Returns
    pods that are still there after their grace period: their machine is lost. `ended_as`: it had ended before."""
    _mark(cluster, record, {STOPPED_AT: _server_time()} | ({ENDED_AS: ended_as} if ended_as else {}))
    left = remove_job(cluster, record, waiting)
    _find_same(cluster, record)
    return left


def delete(cluster: Cluster, record: Record, data: bool, waiting: Waiting) -> list[str]:
    """Remove everything of a run, its record last; its volumes only where `data` says so."""
    _mark(cluster, record, {ATTEMPT: _new_attempt()})
    left = remove_job(cluster, record, waiting)
    # A fetch that was killed leaves its pod behind for a while.
    for pod in cluster.find("v1", "Pod", record.namespace, {**APP_LABEL, READER_LABEL: record.run_id}):
        cluster.delete("v1", "Pod", pod["metadata"]["name"], record.namespace)
    if data:
        _delete_claims(cluster, record)
    found = _find_same(cluster, record)
    name, version = config_map_name(record.run_id), found["metadata"].get("resourceVersion")
    with _refused_if_changed(cluster, record):
        cluster.delete("v1", "ConfigMap", name, record.namespace, uid=_uid(found), resource_version=version)
    return left


def _delete_claims(cluster: Cluster, record: Record) -> None:
    """A run whose data begins to go cannot be resumed any more: its record says so first."""
    claims = [manifest for manifest in render(record.plan) if manifest["kind"] == "PersistentVolumeClaim"]
    uids = _uids(cluster, claims)
    _note(cluster, record, {DELETED_AT: _server_time()})
    for claim in claims:
        if _key(claim) in uids:
            _delete_ours(cluster, claim, record.run_id, uids[_key(claim)])


def _mark(cluster: Cluster, record: Record, notes: dict[str, str]) -> None:
    """From here on no launch that is under way ends well, so that all there is of this one can be seen."""
    cluster.check_right("delete", _job(record))
    _note(cluster, record, notes)


def _note(cluster: Cluster, record: Record, notes: dict[str, str]) -> None:
    """Annotate the record of this launch, whoever else does meanwhile."""
    while True:
        found = _find_same(cluster, record)
        with suppress(_Changed):
            _patch_record(cluster, record, found, {"metadata": {"annotations": notes}})
            return


def _server_time() -> str:
    return server_now().strftime("%Y-%m-%dT%H:%M:%SZ")


def _job(record: Record) -> Manifest:
    """The last that is made, and the first to go."""
    return render(record.plan)[-1]


def remove_job(cluster: Cluster, record: Record, waiting: Waiting | None = None) -> list[str]:
    """The job, then its pods (which save first), then what stood around it; nothing of a later launch."""
    manifests = [manifest for manifest in render(record.plan) if manifest["kind"] not in KEPT]
    uids = _uids(cluster, manifests)
    _find_same(cluster, record)
    *around, job = manifests  # the last that is made is the first to go
    if _key(job) in uids:
        _delete_ours(cluster, job, record.run_id, uids[_key(job)])
    left = _wait_for_pods(cluster, record, waiting)
    for manifest in reversed(around):
        if _key(manifest) in uids:
            _delete_ours(cluster, manifest, record.run_id, uids[_key(manifest)])
    return left


def _uids(cluster: Cluster, manifests: list[Manifest]) -> dict[str, str]:
    """Kind and name -> uid, of those that are there."""
    uids = {}
    for manifest in manifests:
        with suppress(Missing):  # its operator was removed, and all of its objects with it
            if (found := find_object(cluster, manifest)) is not None:
                uids[_key(manifest)] = _uid(found)
    return uids


def _key(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def _wait_for_pods(cluster: Cluster, record: Record, waiting: Waiting | None) -> list[str]:
    """Pods that are on a lost machine are not waited for. A cluster that is away for a moment is."""
    grace = record.config.launch.grace_period_sec + GRACE_MARGIN_SEC
    deadline = time.monotonic() + grace + OVERDUE_SEC
    while True:
        try:
            pods = cluster.find("v1", "Pod", record.namespace, record.selector)
            _find_same(cluster, record)  # else they may be the pods of a later launch
        except ClusterError:
            if time.monotonic() > deadline:
                raise
            time.sleep(CONFIRM_SEC)
            continue
        if all(is_overdue(pod) for pod in pods) or time.monotonic() > deadline:
            return [pod["metadata"]["name"] for pod in pods]
        if waiting:
            waiting(pods)
        time.sleep(CONFIRM_SEC)


def is_overdue(pod: Object) -> bool:
    """Whether a pod should be gone: its time to end is over, and nothing on its machine says that it has ended."""
    leaves_at = pod["metadata"].get("deletionTimestamp")
    if leaves_at is None:
        return False
    return seconds_since(leaves_at) > OVERDUE_SEC


def _delete_ours(cluster: Cluster, manifest: Manifest, run_id: str, uid: str | None = None) -> None:
    """`uid`: only that very object. Without one: that of this name, and none that takes its place meanwhile."""
    try:
        found = find_object(cluster, manifest)
    except Missing:  # its operator was removed, and all of its objects with it
        return
    if found is None or not belongs_to_run(found, run_id) or uid not in (None, found["metadata"].get("uid")):
        return
    meta, uid = manifest["metadata"], found["metadata"].get("uid")
    try:
        cluster.delete(manifest["apiVersion"], manifest["kind"], meta["name"], meta["namespace"], uid=uid)
    except LlmtrainError as problem:
        if problem.details.get("status") != "HTTP 409":
            raise


def find_object(cluster: Cluster, manifest: Manifest) -> Object | None:
    meta = manifest["metadata"]
    return cluster.get(manifest["apiVersion"], manifest["kind"], meta["name"], meta["namespace"])


@contextmanager
def undoing() -> Iterator[list[Callable[[], object]]]:
    """Take back what was done when something goes wrong, Ctrl-C included."""
    undo: list[Callable[[], object]] = []
    try:
        yield undo
    except BaseException:
        for step in reversed(undo):
            with suppress(LlmtrainError):  # the first error is the one to tell
                step()
        raise


def take_back(cluster: Cluster, plan: JobPlan) -> list[str]:
    """Remove every object that a launch made. A volume stays if an earlier launch made it, or if a pod has run: there
    may be data on it. Returns the claims that stay."""
    kept = []
    pods = cluster.find("v1", "Pod", plan.namespace, dict(plan.selector))
    has_run = any(
        "running" in each.get("state", {}) or "terminated" in each.get("state", {}) or each.get("restartCount")
        for pod in pods
        for each in pod.get("status", {}).get("containerStatuses") or []
    )
    for manifest in reversed(render(plan)):
        if manifest["kind"] == "PersistentVolumeClaim":
            found = find_object(cluster, manifest)
            notes = (found or {"metadata": {}})["metadata"].get("annotations") or {}
            if has_run or notes.get(LAUNCH_ANNOTATION) != plan.launch_id:
                kept += [manifest["metadata"]["name"]] if found else []
                continue
        _delete_ours(cluster, manifest, plan.run_id)
    return kept


def _check_claims(cluster: Cluster, plan: JobPlan) -> None:
    """Claims that are named must be there; those that are must be shared if several machines are to mount them."""
    for name, volume in plan.launch.volumes.items():
        claim = plan.claim(name)
        found = cluster.get("v1", "PersistentVolumeClaim", claim, plan.namespace)
        if found is None:
            if not volume.claim:
                continue
            known = [c["metadata"]["name"] for c in cluster.find("v1", "PersistentVolumeClaim", plan.namespace)]
            if not known:  # is there such a namespace at all? Not everybody may look, but making something tells
                with suppress(AlreadyThere):
                    cluster.create(render(plan)[0], dry_run=True)
            raise UsageError(
                f"launch.{name}_volume.claim: there is no claim {claim} in namespace {plan.namespace}.",
                known=known,
                remedy="Name one that is there, or give a size for one to be made.",
            )
        modes = found["spec"].get("accessModes") or []
        if plan.nodes > 1 and modes and all(mode in SINGLE_NODE_MODES for mode in modes):
            raise UsageError(
                f"The claim {claim} (launch.{name}_volume) is {', '.join(modes)}: one machine at a time can mount it, "
                f"but {plan.nodes} nodes need it.",
                remedy="Use a ReadWriteMany claim, or one node.",
            )


def _taken(cluster: Cluster, found: Object, plan: JobPlan) -> UsageError:
    place = cluster.place(plan.namespace)
    kind, name = found["kind"], found["metadata"]["name"]
    if not belongs_to_run(found, plan.run_id):
        return UsageError(
            f"{kind} {name} in namespace {plan.namespace} exists already, and is not of this run.",
            remedy="Nothing was changed. Launch under another --name, or remove that object if it is yours.",
        )
    if _is_leaving(found):
        return AlreadyThere(
            f"{kind} {name} in namespace {plan.namespace} is still being deleted.", remedy="Wait until it is gone."
        )
    if kind == "PersistentVolumeClaim":
        return AlreadyThere(
            f"The volume {name} of an earlier run '{plan.run_id}' is still there.",
            remedy="Go on with that run (--resume), give another --name, or remove it: kubectl delete pvc "
            f"{name}{place}",
        )
    return AlreadyThere(
        f"Run '{plan.run_id}' exists already in namespace {plan.namespace}.",
        remedy=f"See it: llmtrain status {plan.run_id}{place}. Go on with it: --resume. Or give another --name.",
    )
