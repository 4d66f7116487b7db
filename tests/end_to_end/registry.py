"""A registry that wants a login: the reading part of the OCI distribution API, out of a containerd's content store.

REGISTRY_LOGIN=user:password registry.py PORT BLOBS TAG DIGEST      serves one image under any repository name
"""

import base64
import json
import os
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PATH = re.compile(r"/v2/(?P<repository>.+)/(?P<kind>manifests|blobs)/(?P<reference>[^/]+)")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    blobs: Path
    tag: str
    digest: str
    login: str

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        if self.headers.get("Authorization") != f"Basic {self.login}":
            body = json.dumps({"errors": [{"code": "UNAUTHORIZED", "message": "authentication required"}]}).encode()
            self._head(401, len(body), {"WWW-Authenticate": 'Basic realm="e2e"', "Content-Type": "application/json"})
            self._body(body)
            return
        match = PATH.fullmatch(self.path)
        if match is None:
            self._head(200 if self.path == "/v2/" else 404, 0, {})
            return
        digest = self.digest if match["reference"] == self.tag else match["reference"]
        path = self.blobs / digest.removeprefix("sha256:")
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest) or not path.is_file():
            self._head(404, 0, {})
            return
        kind = "application/octet-stream"
        if match["kind"] == "manifests":
            kind = json.loads(path.read_bytes()).get("mediaType", "application/vnd.oci.image.manifest.v1+json")
        self._head(200, path.stat().st_size, {"Content-Type": kind, "Docker-Content-Digest": digest})
        with path.open("rb") as file:
            while self.command == "GET" and (data := file.read(1 << 20)):
                self.wfile.write(data)

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def _body(self, data: bytes) -> None:
        if self.command == "GET":
            self.wfile.write(data)


if __name__ == "__main__":
    port, blobs, tag, digest = sys.argv[1:]
    login = base64.b64encode(os.environ["REGISTRY_LOGIN"].encode()).decode()
    values = {"blobs": Path(blobs), "tag": tag, "digest": digest, "login": login}
    ThreadingHTTPServer(("127.0.0.1", int(port)), type("Registry", (Handler,), values)).serve_forever()
