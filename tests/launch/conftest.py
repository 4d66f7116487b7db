"""An API server whose objects go away soon."""

from collections.abc import Iterator

import pytest

from kube_server import KubeServer, kube_server
from llmtrain.launch import lifecycle


@pytest.fixture
def kube(monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeServer]:
    monkeypatch.setattr(lifecycle, "POLL_SEC", 0.01)
    with kube_server() as server:
        yield server
