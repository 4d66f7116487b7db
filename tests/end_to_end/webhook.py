"""A webhook on this machine that pods of the test cluster can reach: at the address of the API server."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import yaml
from kube import Kube


@dataclass
class Webhook:
    url: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def webhook(kube: Kube) -> Iterator[Webhook]:
    told = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert body.endswith(b"\n")
            assert body.count(b"\n") == 1
            told.rows.append(json.loads(body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    [cluster] = yaml.safe_load(kube.kubeconfig.read_text())["clusters"]
    host = urlsplit(cluster["cluster"]["server"]).hostname
    server = ThreadingHTTPServer(("0.0.0.0", 0), Handler)
    told.url = f"http://{host}:{server.server_port}/hook"
    threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()
