"""A run of 512 processes: the scheduler, the controllers and the API are real, the 64 machines are pretended (KWOK).
Nothing runs in their pods, so they have no logs, and each command must do without them, soon."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from kube import HOME, TOOLS, Done, Kube

pytestmark = pytest.mark.slow
NODES = 64
RUN = "big"


@pytest.fixture(scope="module", autouse=True)
def machines(kube: Kube) -> Iterator[None]:
    """Taken away again: the scheduler speaks of them to everybody else."""
    if kube.kubeconfig != HOME / "run" / "admin.kubeconfig" or not (TOOLS / "simulate").exists():
        pytest.skip("needs ../shared/kube, whose cluster can pretend machines")
    were_there = bool(kube.objects("nodes", "-l", "type=simulated"))
    subprocess.run([str(TOOLS / "cluster"), "simulate", str(NODES), "--gpus", "8"], check=True, capture_output=True)
    yield
    kube.kubectl("delete", "jobs,pods", "--all", "--force", "--grace-period=0")
    if not were_there:
        kube.kubectl("delete", "nodes", "-l", "type=simulated", "--wait=false")
        with suppress(ProcessLookupError):
            os.kill(int((HOME / "run" / "kwok.pid").read_text()), signal.SIGTERM)


@pytest.fixture(scope="module")
def launched(kube: Kube) -> None:
    kube.claim("data")
    launch(kube, RUN)
    kube.wait(RUN, lambda status: running(status) == NODES, within=60)


def launch(kube: Kube, run: str, *more: str) -> None:
    """The preset as it is, but for the taint of the pretended machines. Each of them has room for one pod of it."""
    job = ["--config", "k8s_gpu_64x8", "--name", run, "--image", kube.image]
    bears = ["--set", "launch.tolerations=[{key: simulated, operator: Exists}]"]
    kube.llmtrain("launch", *job, *bears, *more, "--detach")


def running(status: dict[str, object]) -> int:
    pods = status["pods"]
    assert isinstance(pods, list)
    return sum(pod["phase"] == "Running" for pod in pods)


def timed(kube: Kube, *words: str, expect: int = 0) -> tuple[float, Done]:
    began = time.monotonic()
    done = kube.llmtrain(*words, expect=expect)
    return time.monotonic() - began, done


@pytest.mark.usefixtures("launched")
class TestOneRun:
    @pytest.mark.parametrize("words", [["status", RUN], ["status"]], ids=["one", "all"])
    def test_status(self, kube: Kube, words: list[str]) -> None:
        seconds, done = timed(kube, *words)
        began = time.monotonic()
        kube.kubectl("get", "pods")
        print(f"{' '.join(words)}: {seconds:.2f} s; kubectl get pods: {time.monotonic() - began:.2f} s")
        out = done.out
        assert "running" in out
        assert out.count("Running  sim-") == NODES if RUN in words else f" {NODES}/{NODES} " in out

    def test_each_pod_on_a_machine_of_its_own(self, kube: Kube) -> None:
        status = kube.status(RUN)
        assert len({pod["node"] for pod in status["pods"]}) == NODES
        assert [pod["ranks"] for pod in status["pods"]] == [f"{8 * i}-{8 * i + 7}" for i in range(NODES)]
        assert status["world_size"] == 8 * NODES

    def test_watch_does_not_tell_each_pod(self, kube: Kube) -> None:
        watching = kube.start("status", RUN, "--watch")
        assert watching.stdout is not None
        lines = [watching.stdout.readline(), watching.stdout.readline()]
        watching.send_signal(signal.SIGINT)
        lines += watching.stdout.readlines()
        assert watching.wait(10) == 0
        assert lines[0] == f"[K8S] {NODES} pods (0 to {NODES - 1}): Running\n"
        assert len(lines) < 10, lines

    def test_logs_that_cannot_be_read(self, kube: Kube) -> None:
        done = kube.llmtrain("logs", RUN, expect=69)
        assert "the log of Pod big-0-" in done.err
        assert "Traceback" not in done.err

    def test_why(self, kube: Kube) -> None:
        done = kube.llmtrain("why", RUN, "--json")
        assert done.json["cause"] == "healthy"
        assert any(line.startswith("Warning: ") and "log" in line for line in done.json["evidence"])

    def test_one_machine_is_lost(self, kube: Kube) -> None:
        victim = kube.status(RUN)["pods"][7]
        at = "2026-01-01T00:00:00Z"
        silent = {"type": "Ready", "status": "False", "reason": "NodeNotReady", "lastTransitionTime": at}
        status = json.dumps({"status": {"conditions": [silent]}})
        kube.kubectl("patch", "pod", victim["name"], "--subresource=status", "-p", status)
        why = kube.llmtrain("why", RUN, "--json").json
        assert why["cause"] == "node_lost"
        assert f"{victim['node']} is NotReady: 1 pod of {NODES} " in why["what"]
        done = kube.llmtrain("recover", RUN, "--json")
        assert [pod["name"] for pod in done.json["recovered"]] == [victim["name"]]
        after = kube.wait(RUN, lambda status: running(status) == NODES, within=60)
        assert victim["name"] not in [pod["name"] for pod in after["pods"]]


@pytest.mark.usefixtures("launched")
def test_one_machine_too_few(kube: Kube) -> None:
    run, wanted = "bigger", NODES + 1
    launch(kube, run, "--nodes", str(wanted), "--set", f"trainer.grad_accum_steps={8 * wanted}")
    kube.wait(run, lambda status: sum(pod["reason"] == "Unschedulable" for pod in status["pods"]) == wanted)
    why = kube.llmtrain("why", run, "--json").json
    assert why["cause"] == "unschedulable"
    assert why["what"].startswith(f"{wanted} of {wanted} pods ")
    assert len(why["evidence"]) < 10

    seconds, done = timed(kube, "delete", RUN)
    print(f"delete of {NODES} pods: {seconds:.1f} s")
    assert f"waiting for {NODES} pods" in done.err
    status = kube.wait(run, lambda status: running(status) == NODES)
    assert status["state"] == "starting"  # all of them, or none
    why = kube.llmtrain("why", run, "--json").json
    assert why["cause"] == "unschedulable"
    assert why["what"].startswith(f"1 of {wanted} pods ")
    assert "nvidia.com/gpu (each pod requests 8) on " in why["what"]
    assert f"{NODES} of {wanted} pods are scheduled." in why["evidence"]
    assert "launch.nodes" in why["remedy"]
    kube.llmtrain("delete", run)
    assert kube.objects("pods") == []
