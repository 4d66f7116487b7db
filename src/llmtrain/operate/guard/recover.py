"""Runs whose machine is lost: its pods stay `Terminating` for ever, and nothing replaces them.

A pod is marked Failed first and then removed by force: the finalizer of a Job goes with a pod that failed, not with one
that is only deleted. What may still run on an unplugged machine does no harm: a newer generation of the run has begun
when it comes back, and the older one publishes nothing.
"""

from collections.abc import Iterable

from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.operate.status.lost_nodes import LostPod, lost_pod


def find_lost(pods: Iterable[Object], after_sec: float) -> tuple[list[LostPod], list[LostPod]]:
    """Pods whose machine has not answered for that long, and those for whom it is too early."""
    lost = [found for pod in pods if (found := lost_pod(pod)) is not None]
    return [pod for pod in lost if pod.since_sec >= after_sec], [pod for pod in lost if pod.since_sec < after_sec]


def recover(cluster: Cluster, namespace: str, pods: Iterable[LostPod]) -> list[LostPod]:
    """Give these pods up, so that the platform makes new ones elsewhere. Returns those that were still there."""
    return [pod for pod in pods if cluster.fail_pod(pod.name, namespace, pod.uid, pod.text)]
