"""make k8s-train, k8s-logs and k8s-clean on a cluster that none of our commands made, and on a volume as `cluster up`
makes it: a folder of the host, which pods write as user 1000."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kube import ROOT, SMALL, Done, Kube, environment

from llmtrain.local_cluster.kind_cluster import open_directory, volume_manifests

CLAIM = "as-up-makes-it"


@pytest.fixture
def folder(kube: Kube, tmp_path: Path) -> Iterator[Path]:
    """Where the claim's files lie on this machine."""
    folder = open_directory(tmp_path / "runs")
    volume, claim = volume_manifests(str(folder), kube.namespace, CLAIM)
    kube.apply(volume)
    kube.apply(claim)
    yield folder
    kube.kubectl("delete", "pvc", CLAIM, "--wait=false")
    kube.kubectl("delete", "pv", volume["metadata"]["name"], "--wait=false")


def make(kube: Kube, target: str, **variables: str) -> Done:
    small = " ".join(f"--set launch.resources.{setting}" for setting in (*SMALL[1:], "cpu=600m"))
    variables = {"K8S_SET": small, "K8S_CLAIM": CLAIM, "K8S_IMAGE": kube.image, **variables}
    variables |= {"K8S_LAST": str(kube.folder / "last-run")}
    variables |= {"K8S_NAMESPACE": kube.namespace, "BIN": str(Path(sys.executable).parent)}
    words = ["make", "-C", str(ROOT), "-o", "setup", target, *(f"{key}={value}" for key, value in variables.items())]
    surroundings = {**environment(kube.folder), "KUBECONFIG": str(kube.kubeconfig)}
    done = subprocess.run(words, env=surroundings, capture_output=True, text=True, timeout=120)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
def test_make_targets_for_runs(kube: Kube, folder: Path) -> None:
    trained = make(kube, "k8s-train", K8S_RUN="by-make")
    assert trained.code == 0, trained.out[-3000:] + trained.err[-3000:]
    assert "[TRAIN] step 30/30" in trained.out
    finished = folder / "by-make" / "finished.json"
    assert json.loads(finished.read_text())["steps"] == 30
    assert finished.stat().st_uid == 1000
    shown = kube.local("runs", "show", "by-make", "--root", str(folder), "--json").json
    assert (shown["run_id"], shown["status"]) == ("by-make", "finished")

    refused = make(kube, "k8s-train", K8S_RUN="by-make")
    assert refused.code != 0
    assert "Run 'by-make' already exists" in refused.err

    logs = make(kube, "k8s-logs")
    assert logs.code == 0, logs.err
    assert "[0] [TRAIN] step 30/30" in logs.out

    cleaned = make(kube, "k8s-clean")
    assert cleaned.code == 0, cleaned.err
    assert f"claim {CLAIM}." in cleaned.out
    assert kube.objects("pods,jobs,configmaps", "-l", "llmtrain.dev/run=by-make") == []
    assert finished.is_file()
    assert make(kube, "k8s-logs").code != 0

    again = make(kube, "k8s-train")  # without a name: a new run
    assert again.code == 0, again.out[-3000:] + again.err[-3000:]
    name = (kube.folder / "last-run").read_text().strip()
    assert json.loads((folder / name / "finished.json").read_text())["steps"] == 30
    logs = make(kube, "k8s-logs")
    assert logs.code == 0, logs.err
    assert "[0] [TRAIN] step 30/30" in logs.out
    assert make(kube, "k8s-clean").code == 0
    assert kube.objects("pods,jobs,configmaps", "-l", f"llmtrain.dev/run={name}") == []
