import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kube_server import KubeServer, kube_server
from limits import limit


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with kube_server() as server:
        yield server


@dataclass
class Served:
    """A page that is served by a thread of the test."""

    access: Any
    catalog: Any
    server: Any
    thread: threading.Thread

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.access.port}"

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(limit(10))


@pytest.fixture
def serve_page() -> Iterator[Callable[..., Served]]:
    """serve_page(root, port=0, key=None, cluster=None, allow_actions=False): the real server in this process."""
    import uvicorn

    from llmtrain.page.run_catalog import RunCatalog
    from llmtrain.page.security import Access
    from llmtrain.page.serve import listen
    from llmtrain.page.server import make_app

    started: list[Served] = []

    def start(root: Path, port: int = 0, key: bytes | None = None, cluster: Any = None, **access: Any) -> Served:
        listener = listen("127.0.0.1", port)
        own = Access(port=listener.getsockname()[1], **({"key": key} if key else {}), **access)
        catalog = RunCatalog(str(root), cluster)
        config = uvicorn.Config(make_app(catalog, own), log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        started.append(Served(own, catalog, server, thread))
        return started[-1]

    yield start
    for each in started:
        each.stop()
