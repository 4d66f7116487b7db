import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kube_server import KubeServer, kube_server

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with kube_server() as server:
        yield server


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short polling intervals and timeouts."""
    from llmtrain.operate.logs import merged_logs as logs
    from llmtrain.operate.logs import pod_log
    from llmtrain.operate.status import watch as follow

    for module, name, value in (
        (follow, "POLL_SEC", 0.05),
        (follow, "START_FAILURE_SEC", 0.3),
        (follow, "REMOVED_SEC", 0.3),
        (follow, "DRAIN_SEC", 1.0),
        (follow, "USAGE_SEC", 0.0),
        (follow, "EVENTS_SEC", 0.0),
        (logs, "POLL_SEC", 0.05),
        (pod_log, "RETRY_SEC", 0.05),
    ):
        monkeypatch.setattr(module, name, value)
