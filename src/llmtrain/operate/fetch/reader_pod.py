"""The reader pod, which mounts the runs volume. Its image only needs python3: the code is
launch/pod_scripts/file_server.py, passed in an environment variable."""

import time
from contextlib import suppress
from typing import Any

from llmtrain.core.env import READER_SCRIPT
from llmtrain.core.text import one_line
from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.kubernetes.labels import APP_LABEL, COMMON_LABELS, READER_LABEL
from llmtrain.launch.pod import NO_SIDECAR, container_security, pod_security, without_empty
from llmtrain.launch.pod_scripts import script_command, script_text
from llmtrain.launch.record import Record
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.startup_failures import CONFIG_REASONS, IMAGE_REASONS

CONTAINER = "reader"
START_SEC = 120.0
POLL_SEC = 0.5
MAX_LIFE_SEC = 3600  # in case it is not deleted: it must not keep the volume
IDLE_SEC = 600  # it exits earlier when nothing reads from it
GRACE_SEC = 1  # not 0: force-deleting a pod while its kubelet works on it crashed a kubelet of v1.34
COMMAND = script_command(READER_SCRIPT, "file_server.py")


def start_reader(run: ObservedRun, name: str) -> None:
    """Create the pod and wait until it runs."""
    _check_claim(run)
    _delete_finished(run)
    run.cluster.create(reader_manifest(run.record, name))
    _wait_until_running(run, name)


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
        **container_security(launch),  # like the pods that wrote the files, which may only be readable by root
        "volumeMounts": [{"name": "runs", "mountPath": record.config.output.mount_path, "readOnly": True}],
    }
    spec = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": MAX_LIFE_SEC,
        "terminationGracePeriodSeconds": GRACE_SEC,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(launch),
        "imagePullSecrets": [{"name": secret} for secret in launch.image_pull_secrets],
        "tolerations": list(launch.tolerations),  # it may run wherever the pods of the run may
        "affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [_node_of_run(record)]}},
        "containers": [container],
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": record.runs_claim}}],
    }
    labels = {**COMMON_LABELS, READER_LABEL: record.run_id, **NO_SIDECAR, **launch.labels}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": record.namespace, "labels": labels, "annotations": NO_SIDECAR},
        "spec": without_empty(spec),
    }


def _node_of_run(record: Record) -> Object:
    """Prefer a node of the run: a ReadWriteOnce volume can be mounted on one node only."""
    selector = {"matchLabels": {record.run_label: record.run_id}}
    return {"weight": 100, "podAffinityTerm": {"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}}


def _check_claim(run: ObservedRun) -> None:
    record = run.record
    if record.runs_claim is None:
        raise UsageError(
            f"Run '{record.run_id}' has no files: launch.runs_volume is null.",
            remedy=f"Read its output: llmtrain logs {run.in_commands}",
        )
    if run.cluster.get("v1", "PersistentVolumeClaim", record.runs_claim, record.namespace) is None:
        claims = run.cluster.find("v1", "PersistentVolumeClaim", record.namespace)
        raise UsageError(
            f"The volume of run '{record.run_id}' does not exist: there is no claim {record.runs_claim} in namespace "
            f"{record.namespace}.",
            known=[claim["metadata"]["name"] for claim in claims],
            remedy="If its files are on another claim, pass it with --claim.",
        )


def _delete_finished(run: ObservedRun) -> None:
    """Delete ended reader pods of this run that a killed process left behind."""
    for pod in run.cluster.find("v1", "Pod", run.namespace, {**APP_LABEL, READER_LABEL: run.run_id}):
        if _phase(pod) in ("Succeeded", "Failed"):
            run.cluster.delete("v1", "Pod", pod["metadata"]["name"], run.namespace, grace_sec=0)


def _wait_until_running(run: ObservedRun, name: str) -> None:
    deadline = time.monotonic() + START_SEC
    while True:
        pod = run.cluster.get("v1", "Pod", name, run.namespace)
        if pod is None:
            raise ClusterError(f"The reader pod {name} was deleted.", remedy="Try again.")
        if is_running(pod):
            return
        _check_permanent_failure(pod, run.record.config.launch.image)
        if time.monotonic() > deadline:
            raise ClusterError(
                f"The reader pod {name} did not start within {START_SEC:.0f} s: {_reason(run.cluster, pod)}",
                remedy=f"Free resources on a node that can mount claim {run.record.runs_claim}, then try again. A "
                "ReadWriteOnce volume may be in use by another pod.",
            )
        time.sleep(POLL_SEC)


def _check_permanent_failure(pod: Object, image: str | None) -> None:
    """Raise for failures that waiting does not fix."""
    state = _state(pod)
    reason = state.get("reason", "")
    message = one_line(state.get("message", ""), 300)
    if reason in IMAGE_REASONS:
        raise UsageError(
            f"Cannot pull image {image} for the reader pod ({reason}): {message}",
            remedy="Pass an image that has python3 and that the cluster can pull with --image.",
        )
    if reason in (*CONFIG_REASONS, "StartError"):
        raise UsageError(
            f"Cannot start image {image} in the reader pod ({reason}): {message}",
            remedy="Pass another image that has python3 with --image.",
        )
    if _phase(pod) in ("Succeeded", "Failed"):
        why = pod.get("status", {}).get("message") or message or reason or "no reason given"
        raise ClusterError(f"The reader pod {pod['metadata']['name']} has ended: {why}", remedy="Try again.")


def _state(pod: Object) -> dict[str, Any]:
    """The waiting or terminated state of its container."""
    for status in pod.get("status", {}).get("containerStatuses") or []:
        state: dict[str, Any] = status.get("state") or {}
        return state.get("waiting") or state.get("terminated") or {}
    return {}


def _reason(cluster: Cluster, pod: Object) -> str:
    """The scheduler's message, or else the newest warning event of the pod."""
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("message"))
    meta = pod["metadata"]
    with suppress(LlmtrainError):
        events = cluster.find("v1", "Event", meta["namespace"], fields={"involvedObject.name": meta["name"]})
        warnings = [event for event in events if event.get("type") == "Warning"]
        if warnings:
            return str(max(warnings, key=lambda event: event.get("lastTimestamp") or "").get("message"))
    return "no reason given."


def _phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))
