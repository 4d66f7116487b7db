"""launch --build with a real buildah, on the cluster of ../shared/kube."""

import os
import shutil
from pathlib import Path

import pytest
import yaml
from kube import HOME, TOOLS, Kube

CACHE = HOME / "images"
# What ../shared/kube/build-image adds on this machine: a base image that is there already, pip's settings, and the way
# onto the nodes, which pull nothing.
BUILDAH = """#!/bin/sh
export PATH="$BUILD_PATH" STORAGE_DRIVER=overlay BUILDAH_ISOLATION=chroot BUILDAH_LAYERS=true
[ "$1" = build ] || exec buildah "$@"
shift
buildah build --pull-never $BUILD_MOUNTS "$@" || exit
buildah push -q "$2" "docker-archive:$BUILD_ARCHIVE:$2" && "$BUILD_LOAD" load "$BUILD_ARCHIVE"
"""


@pytest.fixture
def builder(kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("buildah") is None:
        pytest.skip("needs buildah")
    if kube.kubeconfig != HOME / "run" / "admin.kubeconfig":
        pytest.skip("loads the image into the nodes of ../shared/kube")
    program = tmp_path / "bin" / "buildah"
    program.parent.mkdir()
    program.write_text(BUILDAH)
    program.chmod(0o755)
    certificates = Path(os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")).parent
    mounts = {certificates: "/etc/ssl/certs", CACHE / "pip.conf": "/etc/pip.conf"}
    monkeypatch.setenv("BUILD_MOUNTS", " ".join(f"-v {source}:{target}:ro" for source, target in mounts.items()))
    monkeypatch.setenv("BUILD_ARCHIVE", str(tmp_path / "image.tar"))
    monkeypatch.setenv("BUILD_LOAD", str(TOOLS / "cluster"))
    monkeypatch.setenv("BUILD_PATH", os.environ["PATH"])
    monkeypatch.setenv("PATH", str(program.parent))  # no docker without a daemon comes first


@pytest.mark.slow
@pytest.mark.usefixtures("builder")
def test_launch_builds_the_image_it_runs(kube: Kube) -> None:
    words = kube.launch_words("indexed_job", "built")
    at = words.index("--image")
    del words[at : at + 2]
    # The extras of kube.image: its layers are used again.
    extras = os.environ.get("LLMTRAIN_E2E_EXTRAS", "k8s")
    kube.llmtrain(*words, "--build", "--build-arg", f"EXTRAS={extras}", timeout=1200)
    assert kube.status("built")["state"] == "finished"
    record = yaml.safe_load(kube.kubectl("get", "configmap", "built-config", "-o", "yaml"))
    config = yaml.safe_load(record["data"]["train.yaml"])
    (pod, *_) = kube.objects("pods", "-l", "llmtrain.dev/run=built")
    assert pod["spec"]["containers"][0]["image"] == config["launch"]["image"]
    assert config["launch"]["image"].startswith("llmtrain:")
    kube.llmtrain("delete", "built")
