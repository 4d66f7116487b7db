"""Pods with a hung process, which no controller detects. Deleting them lets the job create new ones, and the run
resumes from its newest checkpoint."""

from collections.abc import Iterable
from dataclasses import dataclass

from llmtrain.errors import LlmtrainError
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch.record import Record
from llmtrain.operate.why.explain import diagnose

GRACE_SEC = 5  # a hung process ignores SIGTERM


@dataclass(frozen=True)
class StalledPod:
    name: str
    node: str | None
    ranks: str
    uid: str


def find_stalled(cluster: Cluster, record: Record, after_sec: float) -> tuple[list[StalledPod], str]:
    """(Hung pods, evidence). The run must have logged nothing for `after_sec` seconds, unless its other processes have
    reported the hung one."""
    snapshot, _, diagnosis = diagnose(cluster, record, after_sec)
    pods = [
        StalledPod(pod.name, pod.node, pod.ranks, str(raw["metadata"].get("uid", "")))
        for pod, raw in snapshot.pods
        if pod.name in diagnosis.hung_pods
    ]
    return pods, diagnosis.what


def replace_stalled(cluster: Cluster, namespace: str, pods: Iterable[StalledPod]) -> list[StalledPod]:
    """Delete these pods. Returns those that still existed."""
    return [pod for pod in pods if _delete(cluster, namespace, pod)]


def _delete(cluster: Cluster, namespace: str, pod: StalledPod) -> bool:
    try:
        return cluster.delete("v1", "Pod", pod.name, namespace, grace_sec=GRACE_SEC, uid=pod.uid)
    except LlmtrainError as problem:
        if problem.details.get("status") == "HTTP 409":  # a new pod has this name
            return False
        raise
