"""Pods on lost nodes, detected from the pods alone: reading nodes needs cluster-wide rights."""

from dataclasses import dataclass

from llmtrain.kubernetes.client import NODE_LOST, Object
from llmtrain.kubernetes.server_clock import seconds_since
from llmtrain.launch.objects import is_overdue


@dataclass(frozen=True)
class LostPod:
    name: str
    node: str
    uid: str
    """Identifies this pod: a new pod of the same name may exist by the time it is removed."""
    since_sec: float
    """How long its node has been NotReady, or its deletion overdue."""
    is_overdue: bool = False
    """Whether the node has not confirmed the deletion of the pod in time."""

    @property
    def text(self) -> str:
        what = "has not confirmed its deletion" if self.is_overdue else "has been NotReady"
        return f"{self.node} {what} for {self.since_sec:.0f} s"


def lost_pod(pod: Object) -> LostPod | None:
    """The pod, if its node is NotReady or its deletion is overdue."""
    status = pod.get("status") or {}
    is_marked_lost = status.get("reason") == NODE_LOST  # a recovery was interrupted before it deleted the pod
    if status.get("phase") in ("Succeeded", "Failed") and not is_marked_lost:
        return None
    meta = pod["metadata"]
    not_ready = node_not_ready_condition(pod)
    if not_ready is not None:
        since = not_ready.get("lastTransitionTime")
    elif is_overdue(pod) or is_marked_lost:
        since = meta.get("deletionTimestamp")
    else:
        return None
    return LostPod(
        name=meta["name"],
        node=pod["spec"].get("nodeName") or "its node",
        uid=str(meta.get("uid", "")),
        since_sec=seconds_since(since) if since else 0.0,
        is_overdue=not_ready is None,
    )


def node_not_ready_condition(pod: Object) -> Object | None:
    """The pod's Ready=False condition if it is caused by its node. Our pods have no probes, so a pod that is not ready
    while its containers are was marked by the node controller."""
    ready = find_condition(pod, "Ready", "False")
    if ready is None or ready.get("reason") == "ReadinessGatesNotReady":
        return None
    if ready.get("reason") == "NodeNotReady" or find_condition(pod, "ContainersReady") is not None:
        return ready
    return None


def find_condition(pod: Object, kind: str, status: str = "True") -> Object | None:
    for each in (pod.get("status") or {}).get("conditions") or []:
        if each["type"] == kind and each.get("status") == status:
            return dict(each)
    return None
