"""Which pods are on a lost machine: told from the pods themselves."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from llmtrain.operate.lost import lost_pod


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
        ("Succeeded", {"Ready": ("False", "NodeNotReady")}),
        ("Failed", {"Ready": ("False", "NodeNotReady")}),
    ],
)
def test_what_is_not_lost(phase: str, conditions: dict[str, tuple[str, str]]) -> None:
    assert lost_pod(pod(phase, **conditions)) is None
