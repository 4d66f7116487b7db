"""The API server dies while a run trains, and comes back: the run notices nothing, whoever watches it goes on."""

import time

import pytest
from cluster_faults import tool, wait_for
from kube import SET, TOOLS, Kube, finished_hash

from llmtrain.registry import KINDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (TOOLS / "cluster").exists(), reason="needs ../shared/kube: its API server is killed"),
]
AWAY_SEC = 10


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_away_in_the_middle(kube: Kube, kind: str, reference: str) -> None:
    run = f"{kind.replace('_', '-')}-away"
    watching = kube.start(*kube.launch_words(kind, run, *SET, "--set", "launch.resources.cpu=600m"))
    wait_for(lambda: (kube.volume("runs") / run / "checkpoints" / "step_20").exists(), 120, "step 20")
    tool("kill-api")
    try:
        time.sleep(AWAY_SEC)
        refused = kube.llmtrain("status", run, expect=69)
        assert "Unable to connect" in refused.err
    finally:
        tool("start-api")
    out, _ = watching.communicate(timeout=300)
    assert watching.returncode == 0, out
    assert "Unable to connect" in out
    assert "the cluster is reachable again" in out
    # Nodes count as silent for a moment: they could not renew their leases. A StatefulSet's end is read from its pods.
    wait_for(lambda: kube.status(run)["state"] == "finished", 60, "status finished")
    assert kube.status(run)["restarts"] == 0
    assert finished_hash(kube, run) == reference
    kube.llmtrain("delete", run)
