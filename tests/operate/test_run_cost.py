"""GPU-hours, cost, memory and time in the status of a run on a cluster."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kube_runs import FakeRun, launch

from kube_server import KubeServer
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.run_status import RunStatus
from llmtrain.operate.status.tables import run_text

STEP = "[TRAIN] step 10/30 | loss 5.1922 | lr 3.00e-03 | 27,610 tok/s | peak 1.5 GB | 1:00:00 left"
ON_GPUS = (
    "run.device=cuda",
    "launch.resources.gpus=1",
    "launch.node_selector={nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}",
)
PRICE = "plan.prices.gpu_hour={h100-80g: 2.5}"


def stamp(hours_ago: float) -> str:
    return (datetime.now(UTC) - timedelta(hours=hours_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


def held(kube: KubeServer, run: FakeRun, index: int, since: float, until: float | None = None) -> None:
    """A pod on a node since so many hours ago."""
    name = run.pod(index)
    status: dict[str, Any] = dict(kube.objects["pods", "team", name]["status"], startTime=stamp(since))
    if until is not None:
        terminated = {"exitCode": 75, "reason": "Error", "startedAt": stamp(since), "finishedAt": stamp(until)}
        status["phase"] = "Failed"
        status["containerStatuses"][0]["state"] = {"terminated": terminated}
    kube.objects["pods", "team", name] = {**kube.objects["pods", "team", name], "status": status}


def status(run: FakeRun) -> RunStatus:
    return ObservedRun(run.cluster, run.record).status


def test_running_run_has_cost_so_far_and_at_the_end(kube: KubeServer) -> None:
    run = launch(kube, "indexed_job", *ON_GPUS, PRICE)
    held(kube, run, 1, since=4, until=3)  # it was replaced
    held(kube, run, 0, since=2)
    held(kube, run, 1, since=2)
    run.say(0, STEP)
    value = status(run).as_dict()
    assert value["gpu_hours"] == pytest.approx(5, abs=0.02)
    assert value["cost"] == {
        "cost": pytest.approx(12.5, abs=0.05),
        "projected": pytest.approx(17.5, abs=0.05),
        "currency": "USD",
    }
    assert value["peak_memory_bytes"] == 1.5e9
    assert value["seconds"] == pytest.approx(4 * 3600, abs=30)
    assert value["predicted"]["peak_memory_bytes"] > 0
    text = run_text(status(run))
    assert re.search(r"^cost       5.0\d GPU-hours, 12.5\d USD so far, 17.5\d USD at the end$", text, re.M), text
    assert "memory     1.5 GB, predicted" in text
    assert "from FLOPs" in text


def test_run_without_gpus_and_prices_has_no_cost(kube: KubeServer) -> None:
    run = launch(kube)
    held(kube, run, 0, since=2)
    held(kube, run, 1, since=2)
    run.say(0, STEP)
    found = status(run)
    assert (found.costs.gpu_hours, found.costs.cost, found.costs.predicted) == (None, None, None)
    assert "cost " not in run_text(found)


def test_price_of_a_node_counts_without_gpus(kube: KubeServer) -> None:
    selector = "launch.node_selector={node.kubernetes.io/instance-type: m7i}"
    run = launch(kube, "indexed_job", selector, "plan.prices.node_hour={m7i: 0.5}")
    held(kube, run, 0, since=2)
    held(kube, run, 1, since=2)
    found = status(run).costs
    assert found.cost is not None
    assert (found.cost.cost, found.cost.projected) == (pytest.approx(2, abs=0.01), None)


def test_pod_that_waits_for_a_node_costs_nothing(kube: KubeServer) -> None:
    run = launch(kube, "indexed_job", *ON_GPUS, PRICE)
    run.pod(0, {})
    assert status(run).costs.gpu_hours == 0
