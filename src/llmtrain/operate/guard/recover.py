"""Replacing pods on lost nodes, which would stay `Terminating` forever.

A pod is marked Failed first and then force-deleted: the Job controller removes its finalizer only from a pod that has
failed. Processes that still run on a disconnected node are harmless: a newer generation of the run has started when it
comes back, and the older one can no longer publish anything.
"""

from collections.abc import Iterable

from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.operate.status.lost_nodes import LostPod, lost_pod


def find_lost(pods: Iterable[Object], after_sec: float) -> tuple[list[LostPod], list[LostPod]]:
    """(Pods lost for at least `after_sec`, pods lost for a shorter time)."""
    lost = [found for pod in pods if (found := lost_pod(pod)) is not None]
    return [pod for pod in lost if pod.since_sec >= after_sec], [pod for pod in lost if pod.since_sec < after_sec]


def recover(cluster: Cluster, namespace: str, pods: Iterable[LostPod]) -> list[LostPod]:
    """Remove these pods so that their controller creates new ones. Returns those that still existed."""
    return [pod for pod in pods if cluster.fail_pod(pod.name, namespace, pod.uid, pod.text)]
