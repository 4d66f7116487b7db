"""launch.pod_patch: a strategic merge patch over the pod template, as `kubectl patch` applies one.

Maps are merged, null deletes a field. Lists that Kubernetes merges by a key (containers by name, ...) are merged by
that key, all other lists are replaced. `$patch: delete` removes a map or an item of such a list, `$patch: replace`
replaces it. What llmtrain needs to find, start and resume the run cannot be changed.
"""

import copy
from collections.abc import Iterator
from typing import Any

from llmtrain.core.env import VARIABLES
from llmtrain.distributed.platform_env import NAMES
from llmtrain.errors import UsageError
from llmtrain.launch.job import JobPlan, Manifest

TRAINER = "trainer"
"""Name of the training container in a patch, whatever the kind calls it."""
DIRECTIVE = "$patch"
# List -> merge key, as in the API types of Kubernetes.
_POD_LISTS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "schedulingGates": "name",
}
_CONTAINER_LISTS = {"env": "name", "ports": "containerPort", "volumeMounts": "mountPath", "volumeDevices": "devicePath"}
MERGE_KEYS: dict[tuple[str, ...], str] = {("spec", name): key for name, key in _POD_LISTS.items()}
MERGE_KEYS |= {("spec", "containers", name): key for name, key in _CONTAINER_LISTS.items()}
MERGE_KEYS |= {("spec", "initContainers", name): key for name, key in _CONTAINER_LISTS.items()}
_VOLUMES = ("spec", "volumes")
_OWN_VARIABLES = {"POD_INDEX", *VARIABLES["Set in pods and worker processes"]}.union(*NAMES.values())
_OWN_VOLUMES = {"config": "it holds the config", "runs": "set launch.runs_volume", "code": "it holds your own code"}
_POD_FIELDS = {
    "restartPolicy": "launch.kind decides it",
    "subdomain": "pods find each other by it",
    "hostname": "pods find each other by it",
    "setHostnameAsFQDN": "pods find each other by it",
    "terminationGracePeriodSeconds": "set launch.grace_period_sec",
}

Path = tuple[str, ...]


def patched(template: Manifest, plan: JobPlan) -> Manifest:
    """The pod template with the patch of the config."""
    if not plan.launch.pod_patch:
        return template
    result: Manifest = _merge(template, _with_container(plan.launch.pod_patch, plan.container), ())
    labels = [key for key in plan.labels if key not in plan.launch.labels]
    if plan.is_launched:  # by a version that accepted it; the run must stay removable
        return result
    problems = [*_broken_metadata(template, result, labels), *_broken_spec(template, result, plan.container)]
    if problems:
        raise UsageError(
            f"launch.pod_patch changes what llmtrain needs: {'; '.join(problems)}.", remedy="Remove it from the patch."
        )
    _check_images(template, result)
    return result


def _check_images(template: Manifest, result: Manifest) -> None:
    for kind in ("initContainers", "containers"):
        known = [each["name"] for each in template["spec"].get(kind, [])]
        for each in result["spec"].get(kind, []):
            if each["name"] not in known and not each.get("image"):
                raise UsageError(
                    f"launch.pod_patch: the new container {each['name']} needs an image; in the pod template: "
                    f"{', '.join(known)}.",
                    remedy=f"Add an image to it, or name one of the pod template ({TRAINER}: the training container).",
                )


def _with_container(patch: Manifest, container: str) -> Manifest:
    """The patch with the name that the kind requires for the training container."""
    patch = copy.deepcopy(patch)
    spec = patch.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    if isinstance(containers, list):
        for each in containers:
            if isinstance(each, dict) and each.get("name") == TRAINER:
                each["name"] = container
    return patch


def _merge(old: Any, change: Any, path: Path) -> Any:
    """`change` applied to `old`, where `path` is the position in the template, without the keys of list items."""
    if isinstance(change, dict):
        _check_directives(change, path)
        if isinstance(old, dict) and change.get(DIRECTIVE) != "replace":
            return _merge_maps(old, change, path)
        if old is not None and not isinstance(old, dict):
            raise _wrong_type(path, "a list" if isinstance(old, list) else f"a value such as {old!r}")
        return _merge_maps({}, change, path)
    if isinstance(old, dict):
        raise _wrong_type(path, "a map")
    if isinstance(old, list) and not isinstance(change, list):
        raise _wrong_type(path, "a list")
    if isinstance(change, list) and path in MERGE_KEYS:
        return _merge_lists(old or [], change, path)
    return change


def _merge_maps(old: Manifest, change: Manifest, path: Path) -> Manifest:
    merged = dict(old)
    for key, value in change.items():
        if key == DIRECTIVE:
            continue
        if value is None or (isinstance(value, dict) and value.get(DIRECTIVE) == "delete"):
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key), value, (*path, key))
    return merged


def _merge_lists(old: list[Any], change: list[Any], path: Path) -> list[Any]:
    key = MERGE_KEYS[path]
    merged = {item[key]: item for item in old}
    items = [item for item in change if item != {DIRECTIVE: "replace"}]
    if len(items) < len(change):
        merged = {}
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get(key), str | int):
            raise UsageError(f"launch.pod_patch: items of {_dotted(path)} need the field {key!r}, got {item!r}.")
        _check_directives(item, path)
        name = item[key]
        if item.get(DIRECTIVE) == "delete":
            merged.pop(name, None)
            continue
        before = {} if item.get(DIRECTIVE) == "replace" else merged.get(name, {})
        if path == _VOLUMES:  # a volume has one source: another one replaces it
            before = {each: value for each, value in before.items() if each in item}
        merged[name] = _merge_maps(before, item, path)
    return list(merged.values())


def _check_directives(change: Manifest, path: Path) -> None:
    unknown = [key for key in change if str(key).startswith("$") and key != DIRECTIVE]
    value = change.get(DIRECTIVE)
    if unknown or value not in (None, "delete", "replace", "merge"):
        found = unknown[0] if unknown else f"{DIRECTIVE}: {value}"
        raise UsageError(
            f"launch.pod_patch: the directive {found!r} in {_dotted(path)} is not supported.",
            known=["$patch: delete", "$patch: replace"],
        )


def _wrong_type(path: Path, expected: str) -> UsageError:
    return UsageError(f"launch.pod_patch: {_dotted(path)} must be {expected}, as in the pod template.")


def _dotted(path: Path) -> str:
    return ".".join(path) or "the patch"


def _broken_metadata(before: Manifest, after: Manifest, own_labels: list[str]) -> Iterator[str]:
    """What the patch has changed that llmtrain needs, and why."""
    metadata = after.get("metadata", {})
    labels = metadata.get("labels") or {}
    for key in own_labels:
        if labels.get(key) != before["metadata"]["labels"][key]:
            yield f"label {key} (the pods of the run are found by it)"
    for key in sorted(set(metadata) - {"labels", "annotations"}):
        yield f"metadata.{key} (only labels and annotations can be patched)"


def _broken_spec(before: Manifest, after: Manifest, container: str) -> Iterator[str]:
    spec = after.get("spec", {})
    own_spec = before["spec"]
    for name, reason in _POD_FIELDS.items():
        if spec.get(name) != own_spec.get(name):
            yield f"spec.{name} ({reason})"
    for name, reason in _OWN_VOLUMES.items():
        if _named(spec.get("volumes"), name) != _named(own_spec["volumes"], name):
            yield f"volume {name} ({reason})"
    for containers in ("initContainers", "containers"):
        for each in own_spec.get(containers, []):
            found = _named(spec.get(containers), each["name"])
            name = TRAINER if each["name"] == container else each["name"]
            if found is None:
                yield f"container {name} (it is required)"
            else:
                yield from _broken_container(each, found, name)


def _broken_container(before: Manifest, after: Manifest, name: str) -> Iterator[str]:
    reasons = {
        "command": "llmtrain starts the processes with it",
        "args": "llmtrain starts the processes with its command",
        "image": "set launch.image",
    }
    for field, why in reasons.items():
        if before.get(field) != after.get(field):
            yield f"{field} of container {name} ({why})"
    old = _variables(before)
    new = _variables(after)
    for key in sorted({*old, *new} & _OWN_VARIABLES):
        if old.get(key) != new.get(key):
            yield f"variable {key} of container {name} (llmtrain or the platform sets it)"
    for mount in before["volumeMounts"]:
        if mount["name"] in _OWN_VOLUMES and mount not in after.get("volumeMounts", []):
            yield f"mount {mount['mountPath']} of container {name} (llmtrain reads and writes there)"


def _variables(container: Manifest) -> dict[str, Manifest]:
    return {row["name"]: row for row in container.get("env") or []}


def _named(rows: list[Manifest] | None, name: str) -> Manifest | None:
    return next((row for row in rows or [] if row.get("name") == name), None)
