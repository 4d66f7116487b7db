"""The pod that reads the runs volume. Its image needs python3 only: the code is launch/pod_scripts/file_server.py, sent
as a variable, so that commands in it stay short."""

import time
from contextlib import suppress
from typing import Any

from llmtrain.env import READER_SCRIPT
from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.kubernetes.labels import APP_LABEL, COMMON_LABELS, READER_LABEL
from llmtrain.launch.pod import NO_SIDECAR, container_security, pod_security, without_empty
from llmtrain.launch.pod_scripts import script_command, script_text
from llmtrain.launch.record import Record
from llmtrain.text import one_line

CONTAINER = "reader"
START_SEC = 120.0
POLL_SEC = 0.5
LIFE_SEC = 3600  # should nobody remove it: the volume is free again then,
GRACE_SEC = 1  # not 0, which takes a pod from its kubelet while that is still at it (one of v1.34 crashed)
IDLE_SEC = 600  # or earlier, when nobody reads any more
COMMAND = script_command(READER_SCRIPT, "file_server.py")
NOT_PULLED = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
NOT_STARTED = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError")


def start_reader(cluster: Cluster, record: Record, name: str) -> None:
    """Make the pod and wait until it runs."""
    _check_claim(cluster, record)
    _sweep(cluster, record)
    cluster.create(reader_manifest(record, name))
    _wait_until_running(cluster, record, name)


def is_running(pod: Object) -> bool:
    return _phase(pod) == "Running" and "deletionTimestamp" not in pod["metadata"]


def reader_manifest(record: Record, name: str) -> Object:
    launch = record.config.launch
    code = script_text("file_server.py")
    container = {
        "name": CONTAINER,
        "image": launch.image,
        "imagePullPolicy": launch.image_pull_policy,
        "command": [*COMMAND, "wait", str(IDLE_SEC)],
        "env": [{"name": READER_SCRIPT, "value": code}],
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}},
        **container_security(launch),  # as the pods that wrote the files: they may be root's alone
        "volumeMounts": [{"name": "runs", "mountPath": record.config.output.mount_path, "readOnly": True}],
    }
    spec = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": LIFE_SEC,
        "terminationGracePeriodSeconds": GRACE_SEC,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(launch),
        "imagePullSecrets": [{"name": secret} for secret in launch.image_pull_secrets],
        "tolerations": list(launch.tolerations),  # where the run's pods may be, it may be too
        "affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [_beside(record)]}},
        "containers": [container],
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": record.runs_claim}}],
    }
    labels = {**COMMON_LABELS, READER_LABEL: record.run_id, **NO_SIDECAR}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": record.namespace, "labels": labels, "annotations": NO_SIDECAR},
        "spec": without_empty(spec),
    }


def _beside(record: Record) -> Object:
    """A ReadWriteOnce volume can only be mounted where the run's pods have it."""
    chosen = {"matchLabels": {record.run_label: record.run_id}}
    return {"weight": 100, "podAffinityTerm": {"labelSelector": chosen, "topologyKey": "kubernetes.io/hostname"}}


def _check_claim(cluster: Cluster, record: Record) -> None:
    if cluster.get("v1", "PersistentVolumeClaim", record.runs_claim, record.namespace) is None:
        claims = cluster.find("v1", "PersistentVolumeClaim", record.namespace)
        raise UsageError(
            f"The volume of run '{record.run_id}' is gone: there is no claim {record.runs_claim} in namespace "
            f"{record.namespace}.",
            known=[claim["metadata"]["name"] for claim in claims],
            remedy="Where its files are on another claim, name that with --claim.",
        )


def _sweep(cluster: Cluster, record: Record) -> None:
    """Readers of this run that have ended without being removed: whoever started them was killed."""
    for pod in cluster.find("v1", "Pod", record.namespace, {**APP_LABEL, READER_LABEL: record.run_id}):
        if _phase(pod) in ("Succeeded", "Failed"):
            cluster.delete("v1", "Pod", pod["metadata"]["name"], record.namespace, grace_sec=0)


def _wait_until_running(cluster: Cluster, record: Record, name: str) -> None:
    deadline = time.monotonic() + START_SEC
    while True:
        pod = cluster.get("v1", "Pod", name, record.namespace)
        if pod is None:
            raise ClusterError(f"The reader pod {name} was removed by somebody else.", remedy="Try again.")
        if is_running(pod):
            return
        _check_hopeless(pod, record)
        if time.monotonic() > deadline:
            raise ClusterError(
                f"The reader pod {name} does not start within {START_SEC:.0f} s: {_reason(cluster, pod)}",
                remedy="Free a little room on a machine that can mount the claim "
                f"{record.runs_claim}, then try again; a ReadWriteOnce volume may be held by another pod.",
            )
        time.sleep(POLL_SEC)


def _check_hopeless(pod: Object, record: Record) -> None:
    """What waiting does not mend."""
    image = record.config.launch.image
    state = _state(pod)
    reason, said = state.get("reason", ""), one_line(state.get("message", ""), 300)
    if reason in NOT_PULLED:
        raise UsageError(
            f"The reader pod's image {image} cannot be pulled ({reason}): {said}",
            remedy="Name an image with --image that the cluster can pull; any with python3 will do.",
        )
    if reason in NOT_STARTED:
        raise UsageError(
            f"The reader pod's image {image} cannot be started ({reason}): {said}",
            remedy="It needs python3. Name another image with --image; any with python3 will do.",
        )
    if _phase(pod) in ("Succeeded", "Failed"):
        why = pod.get("status", {}).get("message") or said or reason or "it does not say why"
        raise ClusterError(f"The reader pod {pod['metadata']['name']} has ended: {why}", remedy="Try again.")


def _state(pod: Object) -> dict[str, Any]:
    """Why its container waits, or has ended."""
    for status in pod.get("status", {}).get("containerStatuses") or []:
        state: dict[str, Any] = status.get("state") or {}
        return state.get("waiting") or state.get("terminated") or {}
    return {}


def _reason(cluster: Cluster, pod: Object) -> str:
    """What the scheduler says, or else the newest warning about the pod."""
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("message"))
    meta = pod["metadata"]
    with suppress(LlmtrainError):
        events = cluster.find("v1", "Event", meta["namespace"], fields={"involvedObject.name": meta["name"]})
        warnings = [event for event in events if event.get("type") == "Warning"]
        if warnings:
            return str(max(warnings, key=lambda event: event.get("lastTimestamp") or "").get("message"))
    return "it does not say why."


def _phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))
