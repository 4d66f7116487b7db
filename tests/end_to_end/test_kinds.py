"""Each kind, from launch to generate: two nodes, the image of docker/Dockerfile, a restricted namespace."""

import json
from pathlib import Path

import pytest
from breaking import wait_for
from kube import Kube

from llmtrain.registry import LAUNCHERS

KINDS = sorted(LAUNCHERS)
EVERYTHING = "services,jobs,statefulsets,networkpolicies,pytorchjobs,trainjobs,trainingruntimes,jobsets"


@pytest.fixture(scope="module")
def reference(kube: Kube) -> str:
    """The hash that the same config ends with on this machine, with two processes."""
    result = kube.local("train", "--config", "ddp_smoke", "--processes", "2", "--json").json
    return str(result["state_sha256"])


@pytest.mark.parametrize("kind", KINDS)
def test_from_launch_to_generate(kube: Kube, kind: str, reference: str) -> None:
    run = f"{kind.replace('_', '-')}-e2e"
    done = kube.llmtrain(*kube.launch_words(kind, run))
    assert "[TRAIN] step 30/30" in done.out + done.err
    assert kube.status(run)["state"] == "finished"

    kube.llmtrain("stop", run)
    assert kube.objects("pods", "-l", f"llmtrain/run={run}") == []
    assert kube.objects(EVERYTHING, "-l", f"llmtrain/run={run}") == []

    kube.llmtrain("fetch", run)  # every pod has gone
    result = json.loads((kube.folder / "runs" / run / "finished.json").read_text())
    assert result["state_sha256"] == reference
    wait_for(lambda: kube.objects("pods") == [], 30, "the reader to go, too")
    text = kube.local("generate", "--run", run, "--prompt", "the ", "--max-new-tokens", "8", "--json").json
    assert text["text"]

    kube.llmtrain("delete", run)
    assert kube.objects("configmaps", "-l", f"llmtrain/run={run}") == []


def test_the_server_accepts_what_is_rendered(kube: Kube) -> None:
    for kind in KINDS:
        done = kube.llmtrain(*kube.launch_words(kind, f"asked-{kind.replace('_', '-')}"), "--dry-run=server")
        assert "accepts" in done.out
    assert [c for c in kube.objects("configmaps") if "asked" in c["metadata"]["name"]] == []


def test_the_kubeconfig_of_the_user_is_not_read(kube: Kube) -> None:
    done = kube.local("status", expect=64)
    assert "No cluster is known" in done.err
    assert not (Path(kube.folder) / ".kube").exists()
