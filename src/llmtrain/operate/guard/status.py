"""Whether the guard of a namespace watches, and what it said last."""

import time
from dataclasses import dataclass

from llmtrain.env import WEBHOOK
from llmtrain.errors import ClusterError, LlmtrainError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.kubernetes.labels import AFTER_ANNOTATION, GUARD_LABELS, INSTALLED_ANNOTATION, LOGS_ANNOTATION
from llmtrain.launch.guard import NAME
from llmtrain.operate.status.startup_failures import IMAGE_REASONS

START_SEC = 120.0
LOG_LINES = 5
_HOPELESS = (*IMAGE_REASONS, "CrashLoopBackOff")


@dataclass(frozen=True)
class GuardStatus:
    watching: bool
    image: str
    after_sec: float
    with_logs: bool
    webhook: bool
    image_pull_policy: str
    image_pull_secrets: list[str]
    reason: str | None
    """Why its pod is not ready, in the cluster's word."""
    message: str
    log: list[str]

    @property
    def text(self) -> str:
        lines = [
            f"the guard {'watches' if self.watching else 'does not watch'}.",
            f"image      {self.image}",
            f"after      {self.after_sec:g} s",
            f"webhook    {'yes' if self.webhook else 'no'}",
            f"logs       {'may be read' if self.with_logs else 'may not be read'}",
        ]
        lines += [f"problem    {self.reason}: {self.message}".rstrip(": ")] if self.reason else []
        return "\n".join([*lines, *(f"  {line}" for line in self.log)])


def guard_status(cluster: Cluster, namespace: str) -> GuardStatus | None:
    """None where there is none."""
    found = cluster.get("apps/v1", "Deployment", NAME, namespace)
    if found is None:
        return None
    notes = found["metadata"].get("annotations") or {}
    [container] = found["spec"]["template"]["spec"]["containers"]
    newest = _installed_at(found["spec"]["template"])
    pods = cluster.find("v1", "Pod", namespace, dict(GUARD_LABELS))
    pods = [pod for pod in pods if _installed_at(pod) == newest]  # one of the install before may still be going
    reason, message = _problem(pods)
    return GuardStatus(
        watching=_is_watching(found),
        image=container["image"],
        after_sec=float(notes.get(AFTER_ANNOTATION, 0)),
        with_logs=notes.get(LOGS_ANNOTATION) == "true",
        webhook=any(row["name"] == WEBHOOK for row in container["env"]),
        image_pull_policy=container.get("imagePullPolicy", ""),
        image_pull_secrets=[row["name"] for row in found["spec"]["template"]["spec"].get("imagePullSecrets") or []],
        reason=reason,
        message=message,
        log=_last_words(cluster, namespace, pods),
    )


def wait_until_watching(cluster: Cluster, namespace: str) -> None:
    deadline = time.monotonic() + START_SEC
    while (status := guard_status(cluster, namespace)) is None or not status.watching:
        reason = status.reason if status else None
        if reason in _HOPELESS or time.monotonic() > deadline:
            why = f"{reason}: {status.message}" if status and reason else "its pod is not ready"
            said = f" It said: {status.log[-1]}" if status and status.log else ""
            raise ClusterError(
                f"The guard is in namespace {namespace}, but does not watch: {why.rstrip(': ')}.{said}",
                remedy="Its image must be llmtrain's, with the extra k8s. How it does: llmtrain guard status"
                f"{cluster.place(namespace)}. Away with it: llmtrain guard remove{cluster.place(namespace)}.",
            )
        time.sleep(1.0)


def _is_watching(deployment: Object) -> bool:
    """The newest version of its pod is ready."""
    status = deployment.get("status") or {}
    is_seen = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
    return is_seen and bool(status.get("updatedReplicas")) and bool(status.get("availableReplicas"))


def _installed_at(pod: Object) -> str | None:
    notes = (pod.get("metadata") or {}).get("annotations") or {}
    return notes.get(INSTALLED_ANNOTATION)


def _problem(pods: list[Object]) -> tuple[str | None, str]:
    """Why the pod is not there, or not ready: the cluster's word and its sentence."""
    for pod in pods:
        status = pod.get("status") or {}
        for row in status.get("containerStatuses") or []:
            waiting = (row.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") not in (None, "ContainerCreating"):
                return waiting["reason"], waiting.get("message") or ""
        for row in status.get("conditions") or []:
            if row["type"] == "PodScheduled" and row["status"] == "False":
                return row.get("reason"), row.get("message") or ""
    return None, ""


def _last_words(cluster: Cluster, namespace: str, pods: list[Object]) -> list[str]:
    try:
        return [
            line for pod in pods for line in cluster.log(pod["metadata"]["name"], namespace, "guard", tail=LOG_LINES)
        ]
    except LlmtrainError:  # no right to logs: the rest can be told
        return []
