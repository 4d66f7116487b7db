"""One cluster for all end-to-end tests, and a restricted namespace with a shared volume for each file of them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from kube import RESTRICTED, Kube, free_volumes, running_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


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
