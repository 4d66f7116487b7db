"""What happens to runs on a cluster: a pod is deleted, a run is stopped and goes on with another number of nodes."""

import re
import signal
import time

import pytest
from cluster_faults import waiting_at
from kube import SET, Kube, finished_hash

from llmtrain.registry import KINDS

SIGNAL_SEC = 3  # until SIGTERM has reached a deleted pod


def deleted_pod(kube: Kube, kind: str, reference: str, index: int) -> None:
    run = f"{kind.replace('_', '-')}-pod-{index}"
    with waiting_at(kube, run, "forward", 25) as wait:
        kube.llmtrain(*kube.launch_words(kind, run, *SET, *wait), "--detach")
        before = kube.wait(run, lambda status: (status["step"] or 0) >= 20)["step"]
        victim = next(pod["name"] for pod in kube.status(run)["pods"] if pod["index"] == index)
        kube.kubectl("delete", "pod", victim, "--wait=false")
        time.sleep(SIGNAL_SEC)
    watched = kube.llmtrain("status", run, "--watch")
    assert kube.status(run)["state"] == "finished"
    assert finished_hash(kube, run) == reference
    starts = [int(step) for step in re.findall(r"from step ([1-9]\d*) to", watched.out + watched.err)]
    assert starts, watched.out + watched.err
    assert all(before - start <= 10 for start in starts)  # the save interval; the deleted pod was told to save, too
    kube.llmtrain("delete", run)


@pytest.mark.slow  # without: test_page.py
def test_deleted_pod_is_replaced(kube: Kube, reference: str) -> None:
    deleted_pod(kube, "indexed_job", reference, index=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_deleted_pod_0_is_replaced_with_every_workload(kube: Kube, kind: str, reference: str) -> None:
    deleted_pod(kube, kind, reference, index=0)


@pytest.mark.slow
def test_an_elastic_run_ends_although_a_pod_found_no_room(kube: Kube, reference: str) -> None:
    """One of up to two nodes: on the machine that they ask for there is room for one."""
    machine = kube.objects("nodes")[0]["metadata"]["name"]
    there = ["--set", f"launch.node_selector={{kubernetes.io/hostname: {machine}}}"]
    words = kube.launch_words("indexed_job", "elastic", *SET, *there, "--set", "launch.nodes=1:2")
    at = words.index("--nodes")
    del words[at : at + 2]
    words[words.index("launch.resources.cpu=900m")] = "launch.resources.cpu=1200m"
    kube.llmtrain(*words, timeout=400)
    assert kube.status("elastic")["state"] == "finished"
    assert finished_hash(kube, "elastic") == reference
    kube.llmtrain("delete", "elastic")


def test_stopped_and_resumed_on_one_node(kube: Kube, reference: str) -> None:
    run = "stopped"
    with waiting_at(kube, run, "forward", 25) as wait:
        watching = kube.start(*kube.launch_words("indexed_job", run, *SET, *wait))
        assert watching.stdout is not None
        for line in watching.stdout:
            if "step 20/" in line:
                break
        watching.send_signal(signal.SIGINT)  # Ctrl-C leaves it running
        last = watching.stdout.read()
        assert watching.wait(10) == 0
        assert f"Run {run} keeps running." in last
        assert kube.status(run)["state"] == "running"
        again = kube.llmtrain(*kube.launch_words("indexed_job", run, *SET), expect=64)
        assert "already exists" in again.err

    stopped = kube.llmtrain("stop", run)
    assert "[SAVE]" in stopped.err
    status = kube.status(run)
    assert status["state"] == "stopped"
    assert status["pods"] == []
    saved = kube.llmtrain("fetch", run, "--json").json
    assert saved["checkpoints"]
    assert kube.llmtrain("logs", run).out.count("[TRAIN]") > 1  # from the volume: there are no pods

    resumed = kube.llmtrain("resume", run, "--nodes", "1")
    assert "from step 0 " not in resumed.out + resumed.err
    assert kube.status(run)["nodes"] == 1
    assert finished_hash(kube, run) == reference
    kube.llmtrain("delete", run)
