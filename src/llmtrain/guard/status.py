"""Status of a namespace's guard: whether it is watching, its settings and its latest log lines."""

import time
from dataclasses import dataclass

from llmtrain.core.env import WEBHOOK
from llmtrain.errors import ClusterError, LlmtrainError
from llmtrain.guard.manifests import NAME
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.kubernetes.labels import AFTER_ANNOTATION, GUARD_LABELS, INSTALLED_ANNOTATION
from llmtrain.operate.status.startup_failures import IMAGE_REASONS

START_SEC = 120.0
LOG_LINES = 5
_FATAL_REASONS = (*IMAGE_REASONS, "CrashLoopBackOff")


@dataclass(frozen=True)
class GuardStatus:
    watching: bool
    image: str
    after_sec: float
    webhook: bool
    image_pull_policy: str
    image_pull_secrets: list[str]
    reason: str | None
    """Why its pod is not ready, as Kubernetes names it."""
    message: str
    log: list[str]

    @property
    def text(self) -> str:
        lines = [
            f"the guard is {'watching' if self.watching else 'not watching'}.",
            f"image      {self.image}",
            f"after      {self.after_sec:g} s",
            f"webhook    {'yes' if self.webhook else 'no'}",
        ]
        if self.reason:
            lines.append(f"problem    {self.reason}: {self.message}".rstrip(": "))
        lines += [f"  {line}" for line in self.log]
        return "\n".join(lines)


def guard_status(cluster: Cluster, namespace: str) -> GuardStatus | None:
    """None if the namespace has no guard."""
    deployment = cluster.get("apps/v1", "Deployment", NAME, namespace)
    if deployment is None:
        return None
    annotations = deployment["metadata"].get("annotations") or {}
    template = deployment["spec"]["template"]
    [container] = template["spec"]["containers"]
    pods = cluster.find("v1", "Pod", namespace, dict(GUARD_LABELS))
    # The pod of an earlier install may still be terminating.
    pods = [pod for pod in pods if _installed_at(pod) == _installed_at(template)]
    reason, message = _problem(pods)
    return GuardStatus(
        watching=_is_watching(deployment),
        image=container["image"],
        after_sec=float(annotations.get(AFTER_ANNOTATION, 0)),
        webhook=any(row["name"] == WEBHOOK for row in container["env"]),
        image_pull_policy=container.get("imagePullPolicy", ""),
        image_pull_secrets=[row["name"] for row in template["spec"].get("imagePullSecrets") or []],
        reason=reason,
        message=message,
        log=_log_tail(cluster, namespace, pods),
    )


def wait_until_watching(cluster: Cluster, namespace: str) -> None:
    """Return once the guard's pod is ready; raise if it cannot become ready."""
    deadline = time.monotonic() + START_SEC
    while True:
        status = guard_status(cluster, namespace)
        if status is not None and status.watching:
            return
        is_fatal = status is not None and status.reason in _FATAL_REASONS
        if is_fatal or time.monotonic() > deadline:
            raise ClusterError(
                f"The guard in namespace {namespace} did not start: {_not_watching_text(status)}",
                remedy="Its image must contain llmtrain with the k8s extra. Status: llmtrain guard status"
                f"{cluster.place(namespace)}. Remove: llmtrain guard remove{cluster.place(namespace)}.",
            )
        time.sleep(1.0)


def _not_watching_text(status: GuardStatus | None) -> str:
    text = "its pod is not ready."
    if status is not None and status.reason:
        text = f"{status.reason}: {status.message}".rstrip(": ") + "."
    if status is not None and status.log:
        text += f" Last log line: {status.log[-1]}"
    return text


def _is_watching(deployment: Object) -> bool:
    """Whether a pod of the newest version is ready."""
    status = deployment.get("status") or {}
    is_current = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
    return is_current and bool(status.get("updatedReplicas")) and bool(status.get("availableReplicas"))


def _installed_at(pod: Object) -> str | None:
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    return annotations.get(INSTALLED_ANNOTATION)


def _problem(pods: list[Object]) -> tuple[str | None, str]:
    """(reason, message) of Kubernetes why the pod is missing or not ready."""
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


def _log_tail(cluster: Cluster, namespace: str, pods: list[Object]) -> list[str]:
    lines: list[str] = []
    try:
        for pod in pods:
            lines += cluster.log(pod["metadata"]["name"], namespace, "guard", tail=LOG_LINES)
    except LlmtrainError:  # not allowed to read logs
        return []
    return lines
