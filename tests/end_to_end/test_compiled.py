"""trainer.compile in pods: the code that one pod has compiled is on the volume, for those that replace it."""

import dataclasses
import subprocess
import time

import pytest
from cluster_faults import waiting_at
from kube import HOME, ROOT, SET, TOOLS, Kube, finished_hash

IMAGE = "llmtrain:e2e-compiler"
COMPILED = ["trainer.compile=true", "data.cache_dir=/out/cache", "launch.resources.memory=3Gi"]
SIGNAL_SEC = 3  # until SIGTERM has reached a deleted pod


@pytest.fixture
def compiling(kube: Kube) -> Kube:
    """With an image that has what torch.compile needs for CPUs. (python:3.11-slim, unlike Debian, has the headers.)"""
    if kube.kubeconfig != HOME / "run" / "admin.kubeconfig":
        pytest.skip("builds an image for the nodes of ../shared/kube")
    arguments = ["--build-arg", "EXTRAS=k8s", "--build-arg", "PACKAGES=g++ python3-dev"]
    file = ["-f", str(ROOT / "docker" / "Dockerfile"), "--layers"]
    subprocess.run([str(TOOLS / "build-image"), IMAGE, str(ROOT), *file, *arguments], check=True, capture_output=True)
    return dataclasses.replace(kube, image=IMAGE)


@pytest.mark.slow
def test_replaced_pod_compiles_nothing(compiling: Kube) -> None:
    kube = compiling
    words = [*SET, *(word for setting in COMPILED for word in ("--set", setting))]
    kube.llmtrain(*kube.launch_words("indexed_job", "first", *words, config="gpt_smoke", nodes=1), timeout=600)
    log = kube.llmtrain("logs", "first").out
    assert "most of them for compiling" in log, log
    expected = finished_hash(kube, "first")
    (packed,) = (kube.volume("runs") / "cache" / "compiled").iterdir()
    before = packed.read_bytes()

    with waiting_at(kube, "second", "forward", 25) as wait:
        more = [*words, *wait]
        kube.llmtrain(*kube.launch_words("indexed_job", "second", *more, config="gpt_smoke", nodes=1), "--detach")
        kube.wait("second", lambda status: (status["step"] or 0) >= 20, within=300)
        (pod,) = kube.status("second")["pods"]
        kube.kubectl("delete", "pod", pod["name"], "--wait=false")
        time.sleep(SIGNAL_SEC)
    watched = kube.llmtrain("status", "second", "--watch", timeout=600)
    assert "with the compiled code of an earlier start" in watched.out + watched.err
    assert finished_hash(kube, "second") == expected
    assert packed.read_bytes() == before, "two more pods have compiled nothing"
    for run in ("first", "second"):
        kube.llmtrain("delete", run)
