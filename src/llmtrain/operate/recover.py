"""Runs whose machine is lost: its pods stay `Terminating` for ever, and nothing replaces them.

A pod is marked Failed first and then removed by force: the finalizer of a Job goes with a pod that failed, not with one
that is only deleted. What may still run on an unplugged machine does no harm: a newer generation of the run has begun
when it comes back, and the older one publishes nothing.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

from llmtrain.launch.apply import is_overdue
from llmtrain.launch.cluster import Cluster, Object
from llmtrain.launch.record import Record
from llmtrain.operate.container_ends import machine_is_silent
from llmtrain.operate.status import find_pods


@dataclass(frozen=True)
class LostPod:
    name: str
    machine: str
    since_sec: float
    """For how long its machine has not answered."""


def find_lost(cluster: Cluster, record: Record, after_sec: float) -> tuple[list[LostPod], list[LostPod]]:
    """Pods whose machine has not answered for that long, and those for whom it is too early."""
    lost = [found for pod in find_pods(cluster, record) if (found := lost_pod(pod)) is not None]
    return [pod for pod in lost if pod.since_sec >= after_sec], [pod for pod in lost if pod.since_sec < after_sec]


def recover(cluster: Cluster, record: Record, pods: list[LostPod]) -> None:
    """Give these pods up, so that the platform makes new ones elsewhere."""
    for pod in pods:
        cluster.fail_pod(pod.name, record.namespace, f"{pod.machine} has not answered for {pod.since_sec:.0f} s")
        cluster.delete("v1", "Pod", pod.name, record.namespace, grace_sec=0)


def lost_pod(pod: Object) -> LostPod | None:
    """A pod whose machine does not answer, or that should be gone and is not."""
    if pod["status"].get("phase") in ("Succeeded", "Failed"):
        return None
    silent = machine_is_silent(pod)
    if silent is None and not is_overdue(pod):
        return None
    since = pod["metadata"]["deletionTimestamp"] if silent is None else silent.get("lastTransitionTime")
    age = (datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds() if since else 0.0
    return LostPod(pod["metadata"]["name"], pod["spec"].get("nodeName") or "its machine", max(0.0, age))
