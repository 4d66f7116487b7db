"""Which pods are on a lost machine: told from the pods themselves."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kube_server import KubeServer
from llmtrain.operate.guard.recover import find_lost, recover
from llmtrain.operate.status.lost_nodes import lost_pod


def pod(phase: str = "Running", **conditions: tuple[str, str]) -> dict[str, Any]:
    since = (datetime.now(UTC) - timedelta(seconds=40)).strftime("%Y-%m-%dT%H:%M:%SZ")
    rows = [
        {"type": name, "status": status, "reason": reason, "lastTransitionTime": since}
        for name, (status, reason) in conditions.items()
    ]
    meta = {"name": "demo-1", "namespace": "team"}
    return {"metadata": meta, "spec": {"nodeName": "machine-1"}, "status": {"phase": phase, "conditions": rows}}


@pytest.mark.parametrize(
    "conditions",
    [
        {"Ready": ("False", "NodeNotReady")},
        {"Ready": ("False", ""), "ContainersReady": ("True", "")},
    ],
)
def test_a_machine_that_does_not_answer(conditions: dict[str, tuple[str, str]]) -> None:
    found = lost_pod(pod(**conditions))
    assert found is not None
    assert (found.name, found.machine) == ("demo-1", "machine-1")
    assert 39 <= found.since_sec < 60


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
def test_what_is_not_lost(phase: str, conditions: dict[str, tuple[str, str]]) -> None:
    assert lost_pod(pod(phase, **conditions)) is None


def test_one_that_was_given_up_and_not_removed() -> None:
    """Whoever did that was cut off in between; a StatefulSet waits for its name."""
    given_up = pod("Failed", Ready=("False", "NodeNotReady"))
    given_up["status"]["reason"] = "NodeLost"
    found = lost_pod(given_up)
    assert found is not None
    assert found.since_sec >= 39


def test_it_acts_on_the_pod_that_was_seen(kube: KubeServer) -> None:
    """Another one has its name by now: a StatefulSet's pods keep theirs."""
    seen = pod(Ready=("False", "NodeNotReady"))
    kube.add({"apiVersion": "v1", "kind": "Pod", **seen})
    lost, _ = find_lost(kube.cluster().find("v1", "Pod", "team"), 10)
    assert recover(kube.cluster(), "team", [replace(lost[0], uid="of-the-one-before")]) == []
    assert kube.objects["pods", "team", "demo-1"]["status"]["phase"] == "Running"
    assert recover(kube.cluster(), "team", lost) == lost
    assert kube.objects == {}
    assert recover(kube.cluster(), "team", lost) == []
