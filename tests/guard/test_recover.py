"""Detecting pods on lost nodes, and removing them."""

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from kube_runs import launch

from kube_server import KubeServer
from llmtrain.operate.recover import find_lost, recover
from llmtrain.operate.status.lost_nodes import lost_pod


def pod(phase: str = "Running", **conditions: tuple[str, str]) -> dict[str, Any]:
    since = (datetime.now(UTC) - timedelta(seconds=40)).strftime("%Y-%m-%dT%H:%M:%SZ")
    rows = [
        {"type": name, "status": status, "reason": reason, "lastTransitionTime": since}
        for name, (status, reason) in conditions.items()
    ]
    meta = {"name": "demo-1", "namespace": "team"}
    return {"metadata": meta, "spec": {"nodeName": "k8s-node1"}, "status": {"phase": phase, "conditions": rows}}


@pytest.mark.parametrize(
    "conditions",
    [
        {"Ready": ("False", "NodeNotReady")},
        {"Ready": ("False", ""), "ContainersReady": ("True", "")},
    ],
)
def test_lost_pod_on_node_that_is_not_ready(conditions: dict[str, tuple[str, str]]) -> None:
    lost = lost_pod(pod(**conditions))
    assert lost is not None
    assert (lost.name, lost.node) == ("demo-1", "k8s-node1")
    assert 39 <= lost.since_sec < 60


@pytest.mark.parametrize(
    ("phase", "conditions"),
    [
        ("Running", {"Ready": ("True", ""), "ContainersReady": ("True", "")}),
        ("Running", {"Ready": ("False", "ContainersNotReady"), "ContainersReady": ("False", "ContainersNotReady")}),
        ("Pending", {"PodScheduled": ("False", "Unschedulable")}),
        ("Running", {"Ready": ("False", "ReadinessGatesNotReady"), "ContainersReady": ("True", "")}),
        ("Succeeded", {"Ready": ("False", "NodeNotReady")}),
        ("Failed", {"Ready": ("False", "NodeNotReady")}),
    ],
)
def test_pod_is_not_lost(phase: str, conditions: dict[str, tuple[str, str]]) -> None:
    assert lost_pod(pod(phase, **conditions)) is None


def test_pod_marked_lost_but_not_deleted_is_still_lost() -> None:
    """A recovery was interrupted between the two steps; a StatefulSet waits for the pod's name."""
    marked = pod("Failed", Ready=("False", "NodeNotReady"))
    marked["status"]["reason"] = "NodeLost"
    lost = lost_pod(marked)
    assert lost is not None
    assert lost.since_sec >= 39


def test_recover_does_not_remove_a_new_pod_of_the_same_name(kube: KubeServer) -> None:
    """Pods of a StatefulSet keep their names."""
    old = pod(Ready=("False", "NodeNotReady"))
    kube.add({"apiVersion": "v1", "kind": "Pod", **old})
    lost, _ = find_lost(kube.cluster().find("v1", "Pod", "team"), 10)
    assert recover(kube.cluster(), "team", [replace(lost[0], uid="uid-of-another-pod")]) == []
    assert kube.objects["pods", "team", "demo-1"]["status"]["phase"] == "Running"
    assert recover(kube.cluster(), "team", lost) == lost
    assert kube.objects == {}
    assert recover(kube.cluster(), "team", lost) == []


def test_requests_are_those_in_the_docs(kube: KubeServer, cli: Callable[..., Any], tmp_path: Path) -> None:
    run = launch(kube)
    run.pod(0)
    lost = run.pod(1)
    old = (datetime.now(UTC) - timedelta(seconds=90)).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {"type": "Ready", "status": "False", "reason": "NodeNotReady", "lastTransitionTime": old}
    kube.change("Pod", lost, {"status": {"conditions": [condition]}})
    sent: list[str] = []
    kube.gate = lambda method, path, headers: sent.append(f"{method} {unquote(path)}")  # noqa: ARG005
    assert cli("recover", "demo", "--kubeconfig", str(kube.kubeconfig(tmp_path)), "--json").json["recovered"]
    page = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()
    shown = re.findall(r"^\| `((?:GET|PATCH|DELETE) [^`]+)` \|", page, re.M)
    expected = [row.replace("RUN", "demo").replace("POD", lost) for row in shown]
    assert [line.replace("/api/v1/namespaces/team/", "") for line in sent] == expected
