"""kubectl scale on a live StatefulSet: the run is not resized by it, and not damaged; why says what resizes it."""

import pytest
from cluster_faults import wait_for
from kube import SET, Kube, finished_hash

ROOM = ["--set", "launch.resources.cpu=500m"]


def launch(kube: Kube, run: str, nodes: str) -> None:
    words = kube.launch_words("stateful_set", run, *SET, *ROOM)
    words[words.index("--nodes") + 1] = nodes
    kube.llmtrain(*words, "--detach")
    kube.wait(run, lambda status: (status["step"] or 0) >= 15)


def scale(kube: Kube, run: str, replicas: int) -> None:
    kube.kubectl("scale", "statefulset", run, f"--replicas={replicas}")


def pods(kube: Kube, run: str) -> list[str]:
    found = kube.objects("pods", "-l", f"llmtrain.dev/run={run}")
    return sorted(pod["metadata"]["name"] for pod in found if pod["status"]["phase"] == "Running")


def check_scaled(kube: Kube, run: str, replicas: int) -> None:
    why = kube.llmtrain("why", run, "--json").json
    assert why["cause"] == "scaled", why
    assert f"llmtrain resume {run} -n {kube.namespace}" in why["remedy"]
    assert f"--nodes {replicas}" in why["remedy"]
    assert str(replicas) in kube.status(run)["why_short"]


def check_finished(kube: Kube, run: str, reference: str) -> None:
    kube.llmtrain("status", run, "--watch", timeout=400)
    assert kube.status(run)["state"] == "finished"
    assert finished_hash(kube, run) == reference
    kube.llmtrain("delete", run)


@pytest.mark.slow
def test_scaled_up(kube: Kube, reference: str) -> None:
    """2 to 3: the third pod is not part of the run, which neither stops nor starts again, not even to end."""
    launch(kube, "up", "2")
    scale(kube, "up", 3)
    wait_for(lambda: len(pods(kube, "up")) == 3, 60, "a third pod")
    check_scaled(kube, "up", 3)
    wait_for(lambda: "exit code 64;" in kube.kubectl("logs", "up-2", expect=None), 60, "the third pod to wait")
    assert not (kube.volume("runs") / "up" / "ended.json").exists()
    assert [pod["index"] for pod in kube.status("up")["pods"]] == [0, 1]
    kube.kubectl("delete", "pod", "up-1", "--wait=false")  # comes back, and finds its run
    check_finished(kube, "up", reference)


@pytest.mark.slow
def test_one_node_scaled_up(kube: Kube, reference: str) -> None:
    launch(kube, "one", "1")
    scale(kube, "one", 2)
    wait_for(lambda: "exit code 64;" in kube.kubectl("logs", "one-1", expect=None), 90, "the second pod to wait")
    check_scaled(kube, "one", 2)
    check_finished(kube, "one", reference)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 0])
def test_scaled_down_and_back(kube: Kube, reference: str, replicas: int) -> None:
    run = f"down-{replicas}"
    launch(kube, run, "2")
    scale(kube, run, replicas)
    wait_for(lambda: len(pods(kube, run)) == replicas, 90, "a pod to go")
    if replicas:
        check_scaled(kube, run, replicas)
    else:
        why = kube.llmtrain("why", run, "--json").json
        assert (why["cause"], "--replicas=2" in why["remedy"]) == ("scaled", True)
    assert kube.status(run)["state"] != "failed"
    scale(kube, run, 2)
    check_finished(kube, run, reference)


@pytest.mark.slow
def test_remedy_of_why_resizes_the_run(kube: Kube, reference: str) -> None:
    """2 to 1 with kubectl, then the commands of the remedy as they stand there."""
    run = "resized"
    launch(kube, run, "2")
    scale(kube, run, 1)
    wait_for(lambda: len(pods(kube, run)) == 1, 90, "a pod to go")
    kube.llmtrain("stop", run)
    kube.llmtrain("resume", run, "--nodes", "1", timeout=400)
    assert kube.status(run)["nodes"] == 1
    check_finished(kube, run, reference)


@pytest.mark.slow
def test_an_elastic_run_is_scaled(kube: Kube, reference: str) -> None:
    """Within its range kubectl scale does resize it."""
    run = "elastic"
    launch(kube, run, "1:2")
    scale(kube, run, 1)
    wait_for(lambda: len(pods(kube, run)) == 1, 90, "a pod to go")
    before = kube.status(run)["step"] or 0
    kube.wait(run, lambda status: status["state"] == "running" and (status["step"] or 0) > before + 5, 180)
    assert kube.llmtrain("why", run, "--json").json["cause"] in ("healthy", "starting")
    scale(kube, run, 2)
    check_finished(kube, run, reference)
