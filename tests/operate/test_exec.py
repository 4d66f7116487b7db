"""Cluster.run: a command in a pod, against a fake API server with a real websocket."""

import base64
import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from limits import limit
from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.kubernetes import client as cluster_module
from llmtrain.kubernetes.client import Cluster
from llmtrain.kubernetes.exec import connect_within

OUT, ERR, VERDICT = 1, 2, 3
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
SUCCESS = json.dumps({"status": "Success"}).encode()
FAILURE = json.dumps({"status": "Failure", "message": "exit code 1"}).encode()


class Line:
    """The server side of a websocket."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._handler = handler

    def frame(self, code: int, data: bytes = b"") -> None:
        size = len(data)
        head = struct.pack("!BB", 0x80 | code, size) if size < 126 else struct.pack("!BBQ", 0x80 | code, 127, size)
        self._handler.connection.sendall(head + data)

    def say(self, channel: int, data: bytes) -> None:
        self.frame(BINARY, bytes([channel]) + data)

    def hear(self) -> int:
        """Type of the next frame from the client."""
        first, second = self._handler.rfile.read(2)
        self._handler.rfile.read(4 + (second & 0x7F))  # the mask, and what it hides
        return first & 0x0F


class Server:
    def __init__(self) -> None:
        self.script: Callable[[Line], None] = lambda line: line.frame(CLOSE)
        self.refusal: tuple[int, str] | None = None
        self.phase = "Running"
        self.asked: list[tuple[str, str]] = []

    def cluster(self) -> Cluster:
        from kubernetes import client

        settings = client.Configuration()
        settings.host = f"http://127.0.0.1:{self.port}"
        return Cluster(settings, "test", "ns")

    port = 0


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if not url.path.endswith("/exec"):
                self._answer(200, json.dumps({"metadata": {}, "status": {"phase": state.phase}}))
            elif state.refusal:
                self._answer(*state.refusal)
            else:
                state.asked = parse_qsl(url.query)
                self._upgrade()
                state.script(Line(self))
            self.close_connection = url.path.endswith("/exec")

        def _answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def _upgrade(self) -> None:
            key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            self.send_response(101)
            self.send_header("Upgrade", "websocket")
            self.send_header("Connection", "Upgrade")
            self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
            self.send_header("Sec-WebSocket-Protocol", "v5.channel.k8s.io")
            self.end_headers()

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:  # a client that has gone is what some tests are about
            pass

    http = Quiet(("127.0.0.1", 0), Handler)
    state.port = http.server_port
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    yield state
    http.shutdown()
    http.server_close()


def run(server: Server) -> bytes:
    return b"".join(server.cluster().run("pod", "ns", "box", ["a b", "c"]))


def test_output_bytes_are_unchanged(server: Server) -> None:
    data = bytes(range(256)) * 1000

    def script(line: Line) -> None:
        line.say(OUT, b"")
        line.say(OUT, data)
        line.say(ERR, b"a warning")
        line.frame(PING, b"are you there")
        assert line.hear() == PONG
        line.say(OUT, data)
        line.say(255, bytes([OUT]))  # version 5 of the protocol: the channel ends
        line.say(VERDICT, SUCCESS)
        line.frame(CLOSE)

    server.script = script
    assert run(server) == data * 2
    assert server.asked == [
        ("container", "box"),
        ("stdout", "true"),
        ("stderr", "true"),
        ("command", "a b"),
        ("command", "c"),
    ]


def test_failed_command(server: Server) -> None:
    def script(line: Line) -> None:
        line.say(ERR, b"Traceback ...\nOSError: no such thing\n")
        line.say(VERDICT, FAILURE)
        line.frame(CLOSE)

    server.script = script
    with pytest.raises(ClusterError, match="failed: OSError: no such thing"):
        run(server)


@pytest.mark.parametrize("ending", [lambda line: line.frame(CLOSE), lambda _: None])
def test_broken_connection(server: Server, ending: Callable[[Line], None]) -> None:
    def script(line: Line) -> None:
        line.say(OUT, b"half")
        ending(line)

    server.script = script
    got = []
    with pytest.raises(ClusterError):
        got += server.cluster().run("pod", "ns", "box", ["x"])
    assert b"".join(got) in (b"half", b"")


@pytest.mark.parametrize(
    ("refusal", "kind", "words"),
    [
        ((404, json.dumps({"message": 'pods "pod" not found'})), ClusterError, "does not exist"),
        (
            (403, json.dumps({"message": 'User "me" cannot create resource "pods/exec" in API group ""'})),
            UsageError,
            "create pods/exec",
        ),
        ((500, json.dumps({"message": "no route to the node"})), ClusterError, "no route to the node"),
    ],
)
def test_refusals(server: Server, refusal: tuple[int, str], kind: type[LlmtrainError], words: str) -> None:
    server.refusal = refusal
    with pytest.raises(kind, match=words):
        run(server)


def test_ended_pod(server: Server) -> None:
    server.phase = "Succeeded"
    with pytest.raises(ClusterError, match="does not exist"):
        run(server)


def test_silent_connection_is_pinged(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "ANSWER_SEC", 0.2)

    def slow(line: Line) -> None:
        for _ in range(3):
            assert line.hear() == PING
            line.frame(PONG)
        line.say(OUT, b"at last")
        line.say(VERDICT, SUCCESS)
        line.frame(CLOSE)

    server.script = slow
    assert run(server) == b"at last"
    server.script = lambda _: time.sleep(limit(2))  # an unreachable node
    began = time.monotonic()
    with pytest.raises(ClusterError, match="Unable to connect"):
        run(server)
    assert time.monotonic() - began < limit(1.5)


@pytest.mark.parametrize("is_accepted", [True, False])
def test_connection_timeout(monkeypatch: pytest.MonkeyPatch, is_accepted: bool) -> None:
    """The server accepts connections but never responds, or does not accept any."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        fillers = []
        if not is_accepted:  # until no other gets in: packets are dropped then
            for _ in range(4):
                filler = socket.socket()
                filler.setblocking(False)
                with suppress(BlockingIOError):
                    filler.connect(listening.getsockname())
                fillers.append(filler)
        from kubernetes import client

        settings = client.Configuration()
        settings.host = f"http://127.0.0.1:{listening.getsockname()[1]}"
        cluster = Cluster(settings, "test", "ns")
        monkeypatch.setattr(cluster_module, "EXEC_SEC", 0.3)
        monkeypatch.setattr(cluster, "get", lambda *_: {"metadata": {}, "status": {"phase": "Running"}})
        with pytest.raises(ClusterError):
            list(cluster.run("pod", "ns", "box", ["true"]))
        for filler in fillers:
            filler.close()


def test_late_connection_is_closed() -> None:
    go, closed = threading.Event(), threading.Event()

    def connect() -> Any:
        go.wait(limit(10))
        return SimpleNamespace(shutdown=closed.set)

    with pytest.raises(TimeoutError):
        connect_within(0.1, connect)
    go.set()
    assert closed.wait(limit(10))


def test_closing_early_does_not_wait(server: Server) -> None:
    def endless(line: Line) -> None:
        while True:
            line.say(OUT, b"x" * 100_000)

    server.script = endless
    pieces = server.cluster().run("pod", "ns", "box", ["x"])
    next(pieces)
    began = time.monotonic()
    pieces.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < limit(1)


def verdict(**more: object) -> bytes:
    return json.dumps({"status": "Failure", "message": "it ended badly", **more}).encode()


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ([SUCCESS], 0),
        ([verdict(details={"causes": [{"reason": "ExitCode", "message": "3"}]})], 3),
        ([verdict(details={"causes": [{"reason": "Other"}, {"reason": "ExitCode", "message": "137"}]})], 137),
        ([SUCCESS[:5], SUCCESS[5:]], 0),
    ],
    ids=["success", "its code", "among others", "in two pieces"],
)
def test_exit_code(server: Server, said: list[bytes], code: int) -> None:
    def script(line: Line) -> None:
        line.say(OUT, b"out")
        line.say(ERR, b"err")
        for piece in said:
            line.say(VERDICT, piece)
        line.frame(CLOSE)

    server.script = script
    process = server.cluster().start("pod", "ns", "box", ["x"])
    assert list(process.output()) == [(OUT, b"out"), (ERR, b"err")]
    assert process.exit_code == code
    process.close()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (verdict(), "it ended badly"),
        (verdict(details=None), "it ended badly"),
        (verdict(details={"causes": None}), "it ended badly"),
        (b"", "was lost"),
        (SUCCESS[:5], "was lost"),
    ],
)
def test_end_without_exit_code(server: Server, said: bytes, words: str) -> None:
    def script(line: Line) -> None:
        line.say(VERDICT, said)
        line.frame(CLOSE)

    server.script = script
    process = server.cluster().start("pod", "ns", "box", ["x"])
    assert list(process.output()) == []
    with pytest.raises(ClusterError, match=words):
        _ = process.exit_code


def test_input_is_sent(server: Server) -> None:
    heard: list[int] = []

    def script(line: Line) -> None:
        heard.append(line.hear())
        line.say(VERDICT, SUCCESS)
        line.frame(CLOSE)

    server.script = script
    process = server.cluster().start("pod", "ns", "box", ["x"], stdin=True)
    process.write(b"hello")
    assert list(process.output()) == []
    assert (heard, process.exit_code) == ([BINARY], 0)
    assert ("stdin", "true") in server.asked
    process.close()
    with pytest.raises(ClusterError):
        process.write(b"too late")


def test_connection_broken_while_reading(server: Server) -> None:
    server.script = lambda line: line.say(OUT, b"half")
    process = server.cluster().start("pod", "ns", "box", ["x"])
    with pytest.raises(ClusterError, match="Unable to connect"):
        list(process.output())
