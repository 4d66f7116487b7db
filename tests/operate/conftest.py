from collections.abc import Iterator

import pytest

from tests.kube_server import KubeServer, kube_server


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with kube_server() as server:
        yield server
