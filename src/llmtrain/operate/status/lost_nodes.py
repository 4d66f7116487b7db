"""Pods whose machine is lost, told from the pods themselves: not everybody may look at machines."""

from dataclasses import dataclass

from llmtrain.kubernetes.client import NODE_LOST, Object
from llmtrain.kubernetes.server_clock import seconds_since
from llmtrain.launch.objects import is_overdue


@dataclass(frozen=True)
class LostPod:
    name: str
    machine: str
    uid: str
    """A pod of the same name may have taken its place by the time something is done about it."""
    since_sec: float
    """For how long its machine has not answered."""

    @property
    def text(self) -> str:
        return f"{self.machine} has not answered for {self.since_sec:.0f} s"


def lost_pod(pod: Object) -> LostPod | None:
    """A pod whose machine does not answer, or that should be gone and is not."""
    status = pod.get("status") or {}
    is_given_up = status.get("reason") == NODE_LOST  # and was not removed: whoever did that was cut off half-way
    if status.get("phase") in ("Succeeded", "Failed") and not is_given_up:
        return None
    meta, silent = pod["metadata"], node_is_not_ready(pod)
    if silent is None and not is_overdue(pod) and not is_given_up:
        return None
    since = meta.get("deletionTimestamp") if silent is None else silent.get("lastTransitionTime")
    machine = pod["spec"].get("nodeName") or "its machine"
    return LostPod(meta["name"], machine, str(meta.get("uid", "")), seconds_since(since) if since else 0.0)


def node_is_not_ready(pod: Object) -> Object | None:
    """The condition that says so. Our pods have no probes, so one whose containers are ready and who is not was marked
    so for its machine."""
    ready = find_condition(pod, "Ready", "False")
    if ready is None or ready.get("reason") == "ReadinessGatesNotReady":
        return None
    is_marked = ready.get("reason") == "NodeNotReady" or find_condition(pod, "ContainersReady") is not None
    return ready if is_marked else None


def find_condition(pod: Object, kind: str, status: str = "True") -> Object | None:
    rows = (pod.get("status") or {}).get("conditions") or []
    return next((row for row in rows if row["type"] == kind and row.get("status") == status), None)
