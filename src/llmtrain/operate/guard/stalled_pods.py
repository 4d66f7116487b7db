"""Pods with a process that hangs: frozen, it notices nothing, and no platform ends it. They are deleted, so that the
job makes new ones and the run goes on from its newest checkpoint."""

from collections.abc import Iterable
from dataclasses import dataclass

from llmtrain.errors import LlmtrainError
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch.record import Record
from llmtrain.operate.why.explain import diagnose

GRACE_SEC = 5  # it does not listen


@dataclass(frozen=True)
class StalledPod:
    name: str
    node: str | None
    """The machine."""
    ranks: str
    uid: str


def find_stalled(cluster: Cluster, record: Record, after_sec: float) -> tuple[list[StalledPod], str]:
    """Pods that hang, and what tells it. A run must have said nothing for so many seconds, unless its other processes
    have named the one that hangs."""
    snapshot, _, found = diagnose(cluster, record, after_sec)
    pods = [
        StalledPod(pod.name, pod.node, pod.ranks, str(raw["metadata"].get("uid", "")))
        for pod, raw in snapshot.pods
        if pod.name in found.frozen
    ]
    return pods, found.what


def replace_stalled(cluster: Cluster, namespace: str, pods: Iterable[StalledPod]) -> list[StalledPod]:
    """Delete these very pods. Returns those that were still there."""
    return [pod for pod in pods if _delete(cluster, namespace, pod)]


def _delete(cluster: Cluster, namespace: str, pod: StalledPod) -> bool:
    try:
        return cluster.delete("v1", "Pod", pod.name, namespace, grace_sec=GRACE_SEC, uid=pod.uid)
    except LlmtrainError as problem:
        if problem.details.get("status") == "HTTP 409":  # another has its name by now
            return False
        raise
