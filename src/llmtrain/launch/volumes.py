"""Volumes that are there already: what a launch cannot change about them is refused, not ignored."""

from decimal import Decimal

from llmtrain.config.launch import LaunchSection, amount
from llmtrain.errors import UsageError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.launch.plan import JobPlan


def check_volumes(cluster: Cluster, plan: JobPlan, before: LaunchSection | None = None) -> None:
    """Refuse a size, a storage class or an access mode that an existing claim does not have. `before`: the run's last
    launch; only what was changed since is looked at, as somebody may have changed the claim itself."""
    for name, volume in plan.launch.volumes.items():
        claim = plan.claim(name)
        found = cluster.get("v1", "PersistentVolumeClaim", claim, plan.namespace)
        if found is None:
            continue
        last = before.volumes.get(name) if before else None
        for field, has in _fields(found).items():
            wanted = getattr(volume, field)
            is_changed = last is not None and getattr(last, field) != wanted
            is_too_small = (
                before is None and field == "size" and not volume.claim and _is_more(wanted, next(iter(has), None))
            )
            if wanted is None or not (is_changed or is_too_small) or _is_one_of(wanted, has):
                continue
            raise UsageError(
                f"launch.{name}_volume.{field} is {wanted}, but the claim {claim} is there already with "
                f"{', '.join(has) or 'none'}, and a launch does not change it.",
                remedy=_remedy(field, wanted, claim, cluster.place(plan.namespace)),
            )


def _fields(found: Object) -> dict[str, list[str]]:
    """What a claim has, in the words of the config."""
    spec = found["spec"]
    size = (spec.get("resources") or {}).get("requests", {}).get("storage")
    has = {"size": [size], "storage_class": [spec.get("storageClassName")], "access_mode": spec.get("accessModes")}
    return {field: [str(value) for value in values or [] if value] for field, values in has.items()}


def _is_one_of(wanted: str, has: list[str]) -> bool:
    return wanted in has or any(_bytes(wanted) == _bytes(value) is not None for value in has)


def _is_more(wanted: str | None, has: str | None) -> bool:
    asked, there = _bytes(wanted or ""), _bytes(has or "")
    return asked is not None and there is not None and asked > there


def _bytes(text: str) -> Decimal | None:
    try:
        return amount(text)
    except (ArithmeticError, KeyError):  # no quantity, or one that another program wrote in its own way
        return None


def _remedy(field: str, wanted: str, claim: str, place: str) -> str:
    if field != "size":
        return f"Leave it out, or name another claim that has it (claim instead of {field})."
    change = f'{{"spec":{{"resources":{{"requests":{{"storage":"{wanted}"}}}}}}}}'
    return (
        "Leave it out. A claim can grow, where its storage class allows that: "
        f"kubectl patch pvc {claim}{place} -p '{change}', then try again."
    )
