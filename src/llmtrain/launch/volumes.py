"""Existing claims: the ones that a launch needs, and the settings that a launch cannot change."""

from contextlib import suppress
from decimal import Decimal

from llmtrain.config.kubernetes_types import amount
from llmtrain.config.launch import SINGLE_NODE_MODES, LaunchSection
from llmtrain.errors import UsageError
from llmtrain.kubernetes.api_errors import AlreadyExists
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.launch.job import JobPlan
from llmtrain.launch.manifests import config_map


def check_claims_exist(cluster: Cluster, plan: JobPlan) -> None:
    """Refuse claims that the config names but that do not exist, and existing claims that not all pods can mount."""
    for name, volume in plan.launch.volumes.items():
        claim = plan.claim(name)
        found = cluster.get("v1", "PersistentVolumeClaim", claim, plan.namespace)
        if found is None:
            if not volume.claim:
                continue
            known = [c["metadata"]["name"] for c in cluster.find("v1", "PersistentVolumeClaim", plan.namespace)]
            if not known:
                # A dry run fails if the namespace is missing, and needs no permission to read namespaces.
                with suppress(AlreadyExists):
                    cluster.create(config_map(plan), dry_run=True)
            raise UsageError(
                f"launch.{name}_volume.claim: claim {claim} does not exist in namespace {plan.namespace}.",
                known=known,
                remedy="Name an existing claim, or set a size to create one.",
            )
        modes = found["spec"].get("accessModes") or []
        if plan.nodes > 1 and modes and all(mode in SINGLE_NODE_MODES for mode in modes):
            raise UsageError(
                f"Claim {claim} (launch.{name}_volume) is {', '.join(modes)}: only one node can mount it, but "
                f"the run has {plan.nodes} pods.",
                remedy="Use a ReadWriteMany claim, or launch.nodes: 1.",
            )


def check_claims_match(cluster: Cluster, plan: JobPlan, before: LaunchSection | None = None) -> None:
    """Refuse a size, storage class or access mode that an existing claim does not have. `before`: the launch section of
    the run's last launch; only fields that differ from it are checked, as the claim itself may have been changed."""
    for name, volume in plan.launch.volumes.items():
        claim = plan.claim(name)
        found = cluster.get("v1", "PersistentVolumeClaim", claim, plan.namespace)
        if found is None:
            continue
        last = before.volumes.get(name) if before else None
        for field, actual in _claim_fields(found).items():
            requested = getattr(volume, field)
            is_changed = last is not None and getattr(last, field) != requested
            is_checked_size = before is None and field == "size" and not volume.claim
            is_too_small = is_checked_size and _is_larger(requested, next(iter(actual), None))
            if requested is None or not (is_changed or is_too_small) or _is_one_of(requested, actual):
                continue
            raise UsageError(
                f"launch.{name}_volume.{field} is {requested}, but the existing claim {claim} has "
                f"{', '.join(actual) or 'none'}, which a launch does not change.",
                remedy=_remedy(field, requested, claim, cluster.place(plan.namespace)),
            )


def _claim_fields(found: Object) -> dict[str, list[str]]:
    """Config field -> values of an existing claim."""
    spec = found["spec"]
    resources = spec.get("resources") or {}
    size = resources.get("requests", {}).get("storage")
    storage_class = spec.get("storageClassName")
    return {
        "size": [str(size)] if size else [],
        "storage_class": [str(storage_class)] if storage_class else [],
        "access_mode": [str(mode) for mode in spec.get("accessModes") or []],
    }


def _is_one_of(requested: str, actual: list[str]) -> bool:
    return requested in actual or any(_bytes(requested) == _bytes(value) is not None for value in actual)


def _is_larger(requested: str | None, actual: str | None) -> bool:
    new = _bytes(requested or "")
    old = _bytes(actual or "")
    return new is not None and old is not None and new > old


def _bytes(text: str) -> Decimal | None:
    try:
        return amount(text)
    except (ArithmeticError, KeyError):  # not a quantity, or in a notation that `amount` does not support
        return None


def _remedy(field: str, requested: str, claim: str, options: str) -> str:
    if field != "size":
        return f"Remove it, or name another claim that has it (claim instead of {field})."
    change = f'{{"spec":{{"resources":{{"requests":{{"storage":"{requested}"}}}}}}}}'
    return (
        "Remove it. If the storage class allows expansion, grow the claim and retry: "
        f"kubectl patch pvc {claim}{options} -p '{change}'"
    )
