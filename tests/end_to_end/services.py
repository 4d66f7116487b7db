"""Servers that runs talk to, inside the cluster: a pod of the training image, its files from a ConfigMap, a Service."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cluster_faults import wait_for
from kube import Kube

from llmtrain.launch.pod import CONTAINER_SECURITY, POD_SECURITY

FILES = "/files"


def start_service(
    kube: Kube,
    name: str,
    command: list[str],
    port: int,
    files: dict[str, str] | None = None,
    env: list[dict[str, Any]] | None = None,
    memory: str = "256Mi",
) -> None:
    """Pods of the namespace reach it at NAME:PORT once this has returned. It goes with the namespace."""
    meta = {"name": name, "labels": {"e2e": name}}
    kube.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": files or {}})
    container = {
        "name": "server",
        "image": kube.image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "env": env or [],
        "ports": [{"containerPort": port}],
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": memory}},
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": "files", "mountPath": FILES},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "cache", "mountPath": "/cache"},
        ],
    }
    spec = {
        "securityContext": POD_SECURITY,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [
            {"name": "files", "configMap": {"name": name}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "cache", "emptyDir": {}},
        ],
    }
    kube.apply({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
    service = {"selector": {"e2e": name}, "ports": [{"port": port}]}
    kube.apply({"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service})

    def is_ready() -> bool:
        conditions = kube.kubectl("get", "pod", name, "-o", "jsonpath={.status.conditions[?(@.type=='Ready')].status}")
        return conditions == "True"

    wait_for(
        is_ready,
        180,
        lambda: f"{name} to listen: {kube.kubectl('describe', 'pod', name)}\n{kube.kubectl('logs', name, expect=None)}",
    )


@contextmanager
def from_here(kube: Kube, name: str, port: int) -> Iterator[str]:
    """HOST:PORT by which this machine reaches the pod of a service."""
    command = [kube.kubectl_program, "--kubeconfig", str(kube.kubeconfig), "-n", kube.namespace]
    with subprocess.Popen(
        [*command, "port-forward", f"pod/{name}", f":{port}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as forwarding:
        try:
            assert forwarding.stdout is not None
            line = forwarding.stdout.readline()  # Forwarding from 127.0.0.1:40123 -> 5000
            if not line.startswith("Forwarding from "):
                forwarding.kill()
                pytest.fail(f"kubectl port-forward: {line}{forwarding.communicate()[1]}")
            yield line.split()[2]
        finally:
            forwarding.kill()
