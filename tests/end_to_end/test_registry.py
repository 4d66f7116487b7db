"""launch.image_pull_secrets against a registry that wants a login. It listens on localhost of every node, where
containerd speaks plain HTTP without being told to, and serves the image that the nodes have under another name."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_faults import wait_for
from kube import HOME, Kube

PORT = 5123
IMAGE = f"localhost:{PORT}/private/llmtrain:1"
LOGIN = ("reader", "e2e-registry-password")
SMALL = ["--set", "launch.resources.cpu=400m", "--set", "launch.image_pull_policy=Always"]


@pytest.fixture(scope="module")
def private(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kube, list[Path]]]:
    """The user of that image, and what each registry notes of its requests."""
    if kube.kubeconfig != HOME / "run" / "admin.kubeconfig":
        pytest.skip("puts a registry into the nodes of ../shared/kube")
    folder = tmp_path_factory.mktemp("registry")
    nodes = sorted(path for path in (HOME / "run").glob("node[0-9]*") if path.is_dir())
    env = {**os.environ, "REGISTRY_LOGIN": ":".join(LOGIN)}
    with ExitStack() as stack:
        for node in nodes:
            inside = ["nsenter", f"--net=/run/netns/lt{node.name}", sys.executable]
            blobs = node / "containerd" / "io.containerd.content.v1.content" / "blobs" / "sha256"
            words = [str(Path(__file__).with_name("registry.py")), str(PORT), str(blobs), "1", digest(node, kube.image)]
            noted = stack.enter_context((folder / node.name).open("w"))
            server = subprocess.Popen([*inside, *words], env=env, stdout=noted, stderr=subprocess.STDOUT)
            stack.callback(server.wait)
            stack.callback(server.kill)
        yield replace(kube, image=IMAGE), [folder / node.name for node in nodes]
    for node in nodes:
        containerd(node, "images", "rm", IMAGE)


def containerd(node: Path, *words: str) -> str:
    command = ["ctr", "-a", str(node / "containerd.sock"), "-n", "k8s.io", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


def digest(node: Path, image: str) -> str:
    """Of the image's manifest on a node, which has it as docker.io/library/NAME."""
    rows = [line.split() for line in containerd(node, "images", "ls").splitlines()]
    return next(row[2] for row in rows if row and row[0].endswith(f"/{image}"))


def codes(noted: list[Path]) -> set[str]:
    """Status codes that were answered."""
    return {line.split()[-2] for path in noted for line in path.read_text().splitlines() if '"' in line}


def ask(kube: Kube, run: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        why = kube.llmtrain("why", run, "--json").json
        if why["cause"] not in ("starting", "pulling_image"):
            return why
        assert time.monotonic() < deadline, why
        time.sleep(1)


def test_without_the_secret(private: tuple[Kube, list[Path]]) -> None:
    kube, noted = private
    kube.llmtrain(*kube.launch_words("indexed_job", "locked-out", *SMALL), "--detach")
    why = ask(kube, "locked-out")
    assert why["cause"] == "image_pull"
    assert "launch.image_pull_secrets" in why["remedy"]
    assert codes(noted) == {"401"}
    kube.llmtrain("delete", "locked-out")


@pytest.mark.slow
def test_with_another_login(private: tuple[Kube, list[Path]]) -> None:
    kube, _ = private
    make_secret(kube, "wrong", "another-password")
    words = ["--set", "launch.image_pull_secrets=[wrong]"]
    refused = kube.llmtrain(*kube.launch_words("indexed_job", "wrong-login", *SMALL, *words), expect=64)
    assert IMAGE in refused.err
    assert "another-password" not in refused.err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["indexed_job", "pytorch_job"])
def test_with_the_secret(private: tuple[Kube, list[Path]], kind: str) -> None:
    kube, noted = private
    run = f"let-in-{kind.replace('_', '-')}"
    make_secret(kube, "registry", LOGIN[1])
    words = ["--set", "launch.image_pull_secrets=[registry]"]
    kube.llmtrain(*kube.launch_words(kind, run, *SMALL, *words))
    assert kube.status(run)["state"] == "finished"
    assert "200" in codes(noted)
    kube.llmtrain("stop", run)
    wait_for(lambda: kube.objects("pods", "-l", f"llmtrain.dev/run={run}") == [], 30, "the pods to go")
    kube.llmtrain("fetch", run)  # by a pod of the same image
    assert (kube.folder / "runs" / run / "finished.json").is_file()
    kube.llmtrain("delete", run)


def make_secret(kube: Kube, name: str, password: str) -> None:
    kube.kubectl("delete", "secret", name, "--ignore-not-found")
    place = [f"--docker-server=localhost:{PORT}", f"--docker-username={LOGIN[0]}"]
    kube.kubectl("create", "secret", "docker-registry", name, *place, f"--docker-password={password}")
