"""One cluster for all end-to-end tests, and a restricted namespace with a shared volume for each file of them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from kube import RESTRICTED, SET, Kube, free_volumes, running_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash that the run of SET ends with when nothing disturbs it: on this machine, with two processes."""
    here = Kube(Path(), "", "", tmp_path_factory.mktemp("reference"))
    return str(here.local("train", "--config", "ddp_smoke", "--processes", "2", *SET, "--json").json["state_sha256"])


@pytest.fixture(scope="module")
def kube(
    cluster: tuple[Path, str], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kube]:
    kubeconfig, image = cluster
    name = f"e2e-{Path(request.node.name).stem.removeprefix('test_').replace('_', '-')}"
    kube = Kube(kubeconfig, image, name, tmp_path_factory.mktemp(name))
    kube.kubectl("delete", "namespace", name, "--ignore-not-found")
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}})
    free_volumes(kubeconfig)
    kube.claim("runs")
    yield kube
    kube.kubectl("delete", "namespace", name, "--wait=false")
