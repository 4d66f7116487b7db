"""A machine that dies under a run: it is named, given up, and the run goes on elsewhere to the same end. Only on the
test cluster, whose machines can be killed."""

import subprocess
import time

import pytest
from kube import TOOLS, Kube
from test_interrupted import SET, finished_hash

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reference(kube: Kube) -> str:
    return str(kube.local("train", "--config", "ddp_smoke", "--processes", "2", *SET, "--json").json["state_sha256"])


@pytest.mark.parametrize("kind", ["indexed_job"])
def test_a_killed_machine(kube: Kube, kind: str, reference: str) -> None:
    run = f"{kind.replace('_', '-')}-lost"
    kube.llmtrain(*kube.launch_words(kind, run, *SET, "--set", "launch.resources.cpu=600m"), "--detach")
    kube.wait(run, lambda status: (status["step"] or 0) >= 20)
    assert kube.llmtrain("why", run, "--json").json["cause"] == "healthy"
    [machine] = [pod["node"] for pod in kube.status(run)["pods"] if pod["index"] == 1]
    subprocess.run([str(TOOLS / "cluster"), "kill-node", machine.removeprefix("node")], check=True, capture_output=True)
    began = time.monotonic()
    try:
        deadline = began + 90
        while (why := kube.llmtrain("why", run, "--json").json)["cause"] != "node_lost":
            assert time.monotonic() < deadline, why
            time.sleep(2)
        named = time.monotonic() - began
        while not (recovered := kube.llmtrain("recover", run, "--after", "5", "--json").json)["recovered"]:
            assert time.monotonic() < deadline, recovered
            time.sleep(2)
        kube.llmtrain("status", run, "--watch", timeout=400)
        assert kube.status(run)["state"] == "finished"
        assert finished_hash(kube, run) == reference
        print(f"{kind}: named after {named:.0f} s")
    finally:
        subprocess.run([str(TOOLS / "cluster"), "start-node", machine.removeprefix("node")], capture_output=True)
    kube.llmtrain("delete", run)
