"""Replacing pods that no controller replaces: those on lost nodes, and those with a hung process.

A pod on a lost node would stay `Terminating` forever. It is marked Failed first and then force-deleted: the Job
controller removes its finalizer only from a pod that has failed. Processes that still run on a disconnected node are
harmless: a newer generation of the run has started when it comes back, and the older one can no longer publish
anything.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from llmtrain.errors import LlmtrainError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.lost_nodes import LostPod, lost_pod
from llmtrain.operate.why.explain import diagnose

GRACE_SEC = 5  # a hung process ignores SIGTERM


@dataclass(frozen=True)
class StalledPod:
    """A pod with a hung process."""

    name: str
    node: str | None
    ranks: str
    uid: str


@dataclass(frozen=True)
class Recovery:
    """What `recover` found and replaced."""

    lost: list[LostPod]
    early: list[LostPod]
    """Pods on nodes that have not been NotReady long enough; not replaced."""
    stalled: list[StalledPod]
    evidence: str
    """Why those are known to hang."""


def recover_run(run: ObservedRun, after_sec: float) -> Recovery:
    """Replace the pods of a run whose node has been NotReady, or which has a rank without progress, for `after_sec`. A
    hung process is searched for only if no node is lost: its peers hang too."""
    lost, early = find_lost(run.pods, after_sec)
    removed = recover(run.cluster, run.namespace, lost)
    if removed or early:
        return Recovery(removed, early, [], "")
    stalled, evidence = find_stalled(run, after_sec)
    return Recovery([], [], replace_stalled(run, stalled), evidence)


def find_lost(pods: Iterable[Object], after_sec: float) -> tuple[list[LostPod], list[LostPod]]:
    """(Pods lost for at least `after_sec`, pods lost for a shorter time)."""
    due: list[LostPod] = []
    early: list[LostPod] = []
    for pod in pods:
        lost = lost_pod(pod)
        if lost is not None:
            (due if lost.since_sec >= after_sec else early).append(lost)
    return due, early


def recover(cluster: Cluster, namespace: str, pods: Iterable[LostPod]) -> list[LostPod]:
    """Remove these pods so that their controller creates new ones. Returns those that still existed."""
    return [pod for pod in pods if cluster.fail_pod(pod.name, namespace, pod.uid, pod.text)]


def find_stalled(run: ObservedRun, after_sec: float) -> tuple[list[StalledPod], str]:
    """(Hung pods, evidence). The run must have logged nothing for `after_sec` seconds, unless its other processes have
    reported the hung one."""
    snapshot, _, diagnosis = diagnose(run, after_sec)
    stalled = []
    for pod, raw in snapshot.pods:
        if pod.name in diagnosis.hung_pods:
            stalled.append(StalledPod(pod.name, pod.node, pod.ranks, str(raw["metadata"].get("uid", ""))))
    return stalled, diagnosis.what


def replace_stalled(run: ObservedRun, pods: Iterable[StalledPod]) -> list[StalledPod]:
    """Delete these pods: their job creates new ones, and the run resumes from its newest checkpoint. Returns those that
    still existed."""
    return [pod for pod in pods if _delete(run, pod)]


def _delete(run: ObservedRun, pod: StalledPod) -> bool:
    try:
        return run.cluster.delete("v1", "Pod", pod.name, run.namespace, grace_sec=GRACE_SEC, uid=pod.uid)
    except LlmtrainError as problem:
        if problem.details.get("status") == "HTTP 409":  # a new pod has this name
            return False
        raise
