"""launch.queue with Kueue, on every kind: what a run waits for, preemption by a higher priority, a queue that does not
exist."""

import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cluster_faults import wait_for, waiting_at
from kube import HOME, SET, TOOLS, Kube, finished_hash

from llmtrain import registry

pytestmark = pytest.mark.slow

KINDS = sorted(registry.KINDS)
QUEUE = "team"
SMALL = ["--set", "launch.resources.cpu=500m"]
KUEUE = "kueue.x-k8s.io/v1beta2"


@pytest.fixture(scope="module")
def queues(kube: Kube) -> Iterator[Kube]:
    """Kueue, a queue with room for two pods, and priorities. It leaves the cluster afterwards: its webhooks stand
    before every pod, also of tests that lose the machine it runs on."""
    if kube.kubeconfig != HOME / "run" / "admin.kubeconfig":
        pytest.skip("installs Kueue, which ../shared/kube has")
    subprocess.run([str(TOOLS / "cluster"), "operators", "kueue"], capture_output=True, check=True, timeout=240)
    resources = [{"name": "cpu", "nominalQuota": "1"}, {"name": "memory", "nominalQuota": "8Gi"}]
    group = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": "e2e", "resources": resources}]}
    preemption = {"withinClusterQueue": "LowerPriority"}
    everywhere: dict[str, Any] = {"namespaceSelector": {}, "resourceGroups": [group], "preemption": preemption}
    objects = [
        {"apiVersion": KUEUE, "kind": "ResourceFlavor", "metadata": {"name": "e2e"}},
        {"apiVersion": KUEUE, "kind": "ClusterQueue", "metadata": {"name": "e2e"}, "spec": everywhere},
        {"apiVersion": KUEUE, "kind": "LocalQueue", "metadata": {"name": QUEUE}, "spec": {"clusterQueue": "e2e"}},
        *(
            {"apiVersion": KUEUE, "kind": "WorkloadPriorityClass", "metadata": {"name": name}, "value": value}
            for name, value in (("low", 10), ("high", 1000))
        ),
    ]
    for manifest in objects:
        kube.apply(manifest)
    yield kube
    kube.kubectl("delete", "jobs,jobsets,pytorchjobs,trainjobs,statefulsets", "--all", "--wait=true", "--timeout=90s")
    for manifest in reversed(objects):
        kube.kubectl("delete", str(manifest["kind"]), str(manifest["metadata"]["name"]), "--timeout=60s", expect=None)
    kube.kubectl("delete", "-f", str(TOOLS / "operators" / "kueue.yaml"), "--wait=false", expect=None)


def launch(kube: Kube, kind: str, run: str, *more: str, queue: str = QUEUE, nodes: int = 2) -> None:
    words = kube.launch_words(kind, run, *SET, *SMALL, "--set", f"launch.queue={queue}", *more, nodes=nodes)
    kube.llmtrain(*words, "--detach")


def workload(kube: Kube, run: str) -> dict[str, dict[str, Any]]:
    """Conditions of what Kueue makes of the run, by type."""
    for item in kube.objects("workloads.kueue.x-k8s.io"):
        if f"-{run}-" in item["metadata"]["name"]:
            return {row["type"]: row for row in item.get("status", {}).get("conditions", [])}
    return {}


def explained(kube: Kube, run: str, cause: str, within: float = 60) -> dict[str, Any]:
    """What why says once it says that."""
    found: dict[str, Any] = {}

    def is_so() -> bool:
        found.update(kube.llmtrain("why", run, "--json").json)
        return found["cause"] == cause

    deadline = time.monotonic() + within
    while not is_so():
        assert time.monotonic() < deadline, json.dumps(found, indent=1)
        time.sleep(1)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_no_such_queue(queues: Kube, kind: str) -> None:
    kube, run = queues, f"no-queue-{kind.replace('_', '-')}"
    launch(kube, kind, run, queue="nosuch")
    why = explained(kube, run, "queue_not_found")
    assert (why["state"], "--set launch.queue=NAME" in why["remedy"]) == ("suspended", True)
    status = kube.status(run)
    assert status["state"] == "suspended"
    assert "nosuch" in status["why_short"]
    assert status["why_short"] != "waits in the queue nosuch"  # with Kueue's own words
    kube.llmtrain("delete", run)


@pytest.mark.parametrize("kind", KINDS)
def test_waits_then_preempts_and_is_preempted(queues: Kube, kind: str, reference: str) -> None:
    """low runs and fills the queue; high comes and takes its place; low waits, is admitted again and ends as if nothing
    had been."""
    kube, short = queues, kind.replace("_", "-")
    low, high = f"low-{short}", f"high-{short}"
    with waiting_at(kube, low, "forward", 20) as wait:  # it must not end before it is preempted
        launch(kube, kind, low, "--set", "launch.queue_priority=low", *wait)
        kube.wait(low, lambda status: (status["step"] or 0) >= 15)
        launch(kube, kind, f"wait-{short}", "--set", "launch.queue_priority=low", nodes=1)
        why = explained(kube, f"wait-{short}", "queued")
        assert "quota" in why["what"]
        assert "quota" in kube.status(f"wait-{short}")["why_short"]
        kube.llmtrain("delete", f"wait-{short}")
        launch(kube, kind, high, "--set", "launch.queue_priority=high", "--set", "trainer.max_steps=40")
        wait_for(lambda: workload(kube, low).get("Evicted", {}).get("status") == "True", 60, f"{low} to be preempted")
    why = explained(kube, low, "queued", 120)
    assert any("Preempted" in line for line in why["evidence"]), why
    kube.llmtrain("status", high, "--watch", timeout=400)
    assert kube.status(high)["state"] == "finished"
    kube.llmtrain("delete", high)  # a StatefulSet holds its place until then
    kube.llmtrain("status", low, "--watch", timeout=400)
    assert kube.status(low)["state"] == "finished"
    assert finished_hash(kube, low) == reference
    generations = json.loads((kube.folder / "runs" / low / "generations.json").read_text())
    assert len(generations) >= 2
    assert generations[1]["from_step"] > 0
    kube.llmtrain("delete", low)
