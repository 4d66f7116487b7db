"""An object store of our own on 127.0.0.1: the few requests of S3 that boto3 makes to list, look at and upload objects.
It notes every request, and fails on demand."""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from limits import limit

PAGE = 4  # keys a listing tells at once: few, so that every test turns pages


@dataclass(frozen=True)
class Stored:
    data: bytes
    metadata: dict[str, str]


@dataclass
class FakeS3:
    url: str = ""
    buckets: dict[str, dict[str, Stored]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """(method, key) in order; multipart uploads are there once, when they are complete."""
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    refused_keys: set[str] = field(default_factory=set)
    """Access key ids that may do nothing."""
    read_only: bool = False
    stuck_after: int | None = None
    """After so many uploads the next one gets no answer, until `go_on` is set."""
    go_on: threading.Event = field(default_factory=threading.Event)
    is_stuck: threading.Event = field(default_factory=threading.Event)

    @property
    def uploads(self) -> list[str]:
        return [key for method, key in self.requests if method == "PUT"]

    def environment(self) -> dict[str, str]:
        """For a process that is to talk to this store and to nothing else."""
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_ACCESS_KEY_ID": "test-access-key-id",
            "AWS_SECRET_ACCESS_KEY": "test-secret-access-key",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_MAX_ATTEMPTS": "1",
            "NO_PROXY": "127.0.0.1",
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: FakeS3

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        body = self._body()
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        asked = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        who = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization") or "")
        if not who or who[1] in self.store.refused_keys or (self.store.read_only and self.command in ("PUT", "POST")):
            return self._refuse(403, "AccessDenied")
        if bucket not in self.store.buckets:
            return self._refuse(404, "NoSuchBucket")
        objects = self.store.buckets[bucket]
        if "list-type" in asked:
            return self._list(bucket, asked)
        if self.command in ("GET", "HEAD"):
            self.store.requests.append((self.command, key))
            found = objects.get(key)
            return self._object(found) if found else self._refuse(404, "NoSuchKey")
        if self.command == "DELETE":
            self.store.parts.pop(asked.get("uploadId", ""), None)
            return self._send(204, b"", {})
        return self._upload(objects, bucket, key, asked, body)

    def _upload(self, objects: dict[str, Stored], bucket: str, key: str, asked: dict[str, str], body: bytes) -> None:
        metadata = {
            name.lower().removeprefix("x-amz-meta-"): value
            for name, value in self.headers.items()
            if name.lower().startswith("x-amz-meta-")
        }
        if "uploads" in asked:
            name = f"upload-{len(self.store.parts)}"
            self.store.parts[name] = {}
            objects[f".{name}"] = Stored(b"", metadata)
            text = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{name}</UploadId>"
            return self._xml("InitiateMultipartUploadResult", text)
        name = asked.get("uploadId", "")
        if "partNumber" in asked:
            self.store.parts[name][int(asked["partNumber"])] = body
        elif name:
            parts = self.store.parts.pop(name)
            body = b"".join(parts[number] for number in sorted(parts))
            self._put(objects, key, Stored(body, objects.pop(f".{name}").metadata))
            return self._xml("CompleteMultipartUploadResult", f"<Key>{escape(key)}</Key><ETag>x</ETag>")
        else:
            self._wait_if_stuck()
            self._put(objects, key, Stored(body, metadata))
        return self._send(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def _put(self, objects: dict[str, Stored], key: str, stored: Stored) -> None:
        objects[key] = stored
        self.store.requests.append(("PUT", key))

    def _wait_if_stuck(self) -> None:
        if self.store.stuck_after is not None and len(self.store.uploads) >= self.store.stuck_after:
            self.store.is_stuck.set()
            self.store.go_on.wait(limit(60))
            raise ConnectionAbortedError  # whoever asked is gone

    def _body(self) -> bytes:
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        if "aws-chunked" not in (self.headers.get("Content-Encoding") or ""):
            return body
        data = b""
        while True:
            head, _, body = body.partition(b"\r\n")
            length = int(head.split(b";")[0], 16)
            if not length:
                return data
            data, body = data + body[:length], body[length + 2 :]

    def _list(self, bucket: str, asked: dict[str, str]) -> None:
        keys = sorted(key for key in self.store.buckets[bucket] if key.startswith(asked.get("prefix", "")))
        start = int(asked.get("continuation-token", "0"))
        page, rest = keys[start : start + PAGE], keys[start + PAGE :]
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.store.buckets[bucket][key].data)}</Size></Contents>"
            for key in page
        )
        more = f"<NextContinuationToken>{start + PAGE}</NextContinuationToken>" if rest else ""
        self._xml(
            "ListBucketResult", f"<Name>{bucket}</Name><IsTruncated>{str(bool(rest)).lower()}</IsTruncated>{more}{rows}"
        )

    def _object(self, stored: Stored) -> None:
        self._send(200, stored.data, {f"x-amz-meta-{name}": value for name, value in stored.metadata.items()})

    def _refuse(self, status: int, code: str) -> None:
        self._xml("Error", f"<Code>{code}</Code><Message>{code}, says the test</Message>", status)

    def _xml(self, name: str, content: str, status: int = 200) -> None:
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}>{content}</{name}>'.encode()
        self._send(status, body, {"Content-Type": "application/xml"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed in the middle is part of the tests."""


@contextmanager
def serve() -> Iterator[FakeS3]:
    store = FakeS3()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": store}))
    store.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        store.go_on.set()
        server.shutdown()
        server.server_close()
