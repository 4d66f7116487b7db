"""Fake held pods: a local directory each, and `exec` over a real websocket that runs real processes."""

import base64
import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import IO, Any
from unittest import mock
from urllib.parse import parse_qsl, urlsplit

from kube_runs import FakeRun, launch

import kube_server
from llmtrain.core.env import HOLD_SCRIPT
from llmtrain.launch.pod_scripts import hold as hold_script
from llmtrain.launch.pod_task import PodTask

BINARY, CLOSE, PING, PONG = 2, 8, 9, 10
IN, OUT, ERR, STATUS = 0, 1, 2, 3
FASTER = {"GRACE_SEC = 10.0": "GRACE_SEC = 0.5", "POLL_SEC = 0.2": "POLL_SEC = 0.03"}
PATH = f"{Path(sys.base_prefix) / 'bin'}:{os.environ['PATH']}"


class HeldPods:
    def __init__(self, kube: kube_server.KubeServer, directory: Path, mode: str, nodes: int, *sets: str) -> None:
        self.directory = directory
        overrides = (f"launch.nodes={nodes}", *sets)
        self.run: FakeRun = launch(kube, "indexed_job", *overrides, task=PodTask(mode))  # type: ignore[arg-type]
        self.names = [self.run.pod(index) for index in range(nodes)]
        self.asked: list[tuple[str, list[str], bool]] = []
        """Pod, command, and whether standard input was requested."""
        self.main: dict[int, subprocess.Popen[bytes]] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.broken: set[str] = set()
        """Pods whose connection breaks after the first output."""
        for name in self.names:
            self.work(self.names.index(name)).mkdir()

    def work(self, index: int) -> Path:
        return self.directory / f"work-{index}"

    def log(self, rank: int) -> Path:
        return self.directory / "runs" / "demo" / "logs" / f"rank-{rank}.log"

    def hold(self) -> None:
        """Start the main processes of the pods."""
        for index, name in enumerate(self.names):
            self.main[index] = self.begin(name, self.run.plan.command, subprocess.DEVNULL)
            stdout = self.main[index].stdout
            assert stdout is not None
            assert b"is ready" in stdout.readline()

    def begin(self, name: str, words: list[str], stdin: int) -> "subprocess.Popen[bytes]":
        rows = self.run.kube.objects["jobs", "team", "demo"]["spec"]["template"]["spec"]["containers"][0]["env"]
        variables = {row["name"]: row["value"] for row in rows if "value" in row}
        text = variables.get(HOLD_SCRIPT, "")
        for old, new in FASTER.items():
            text = text.replace(old, new)
        index = self.names.index(name)
        env = {**variables, "PATH": PATH, HOLD_SCRIPT: text, "LLMTRAIN_WORK": str(self.work(index)), "NODE": str(index)}
        volume = self.run.plan.mounts["runs"]
        words = [word.replace(f"{volume}/demo/", f"{self.directory}/runs/demo/") for word in words]
        pipe = subprocess.PIPE
        made = subprocess.Popen(words, env=env, stdin=stdin, stdout=pipe, stderr=pipe, start_new_session=True)
        self.processes.append(made)
        return made

    def exec(self, handler: BaseHTTPRequestHandler) -> None:
        url = urlsplit(handler.path)
        found = re.search(r"/pods/([^/]+)/exec$", url.path)
        assert found
        query = parse_qsl(url.query, keep_blank_values=True)
        words = [value for key, value in query if key == "command"]
        has_stdin = ("stdin", "true") in query
        assert ("container", "trainer") in query
        self.asked.append((found[1], words, has_stdin))
        line = Line(handler)
        try:
            process = self.begin(found[1], words, subprocess.PIPE if has_stdin else subprocess.DEVNULL)
        except OSError as problem:  # the kubelet's response if the program does not exist
            line.send_status({"status": "Failure", "reason": "InternalError", "message": str(problem)})
            return
        line.serve(process, found[1] in self.broken)

    def end(self) -> None:
        numbers = {number for process in self.processes for number in hold_script.descendants(process.pid)}
        for process in self.processes:
            process.kill()
        for number in numbers:
            hold_script.send_signal(os.kill, number, signal.SIGKILL)
        for process in self.processes:
            process.wait()


class Line:
    """The server side of a websocket, connected to a process."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._handler, self._lock = handler, threading.Lock()
        key = handler.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        handler.send_response(101)
        handler.send_header("Upgrade", "websocket")
        handler.send_header("Connection", "Upgrade")
        handler.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        handler.send_header("Sec-WebSocket-Protocol", "v4.channel.k8s.io")
        handler.end_headers()

    def serve(self, process: "subprocess.Popen[bytes]", is_broken: bool) -> None:
        if process.stdin is not None:
            threading.Thread(target=self._listen, args=(process.stdin,), daemon=True).start()
        threads = [
            threading.Thread(target=self._copy, args=(channel, pipe, is_broken), daemon=True)
            for channel, pipe in ((OUT, process.stdout), (ERR, process.stderr))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        code = process.wait()
        code = code if code >= 0 else 128 - code
        row: dict[str, Any] = {"status": "Success"}
        if code:
            causes = [{"reason": "ExitCode", "message": str(code)}]
            row = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
            row["message"] = f"command terminated with non-zero exit code: exit status {code}"
        if not is_broken:
            self.send_status(row)

    def send_status(self, row: dict[str, Any]) -> None:
        with suppress(OSError):
            self._frame(BINARY, bytes([STATUS]) + json.dumps(row).encode())
            self._frame(CLOSE, b"")

    def _copy(self, channel: int, pipe: IO[bytes], is_broken: bool) -> None:
        with suppress(OSError):
            while data := os.read(pipe.fileno(), 4096):
                self._frame(BINARY, bytes([channel]) + data)
                if is_broken:
                    self._handler.connection.shutdown(2)
        while os.read(pipe.fileno(), 4096):  # drain the pipe so that the process does not block
            pass

    def _frame(self, code: int, data: bytes) -> None:
        size = len(data)
        head = struct.pack("!BB", 0x80 | code, size) if size < 126 else struct.pack("!BBQ", 0x80 | code, 127, size)
        with self._lock:
            self._handler.connection.sendall(head + data)

    def _listen(self, stdin: IO[bytes]) -> None:
        """Copy to its standard input, which closes with the connection."""
        with suppress(OSError, ValueError, struct.error):
            while (found := self._next()) is not None:
                code, data = found
                if code == CLOSE:
                    break
                if code == PING:
                    self._frame(PONG, data)
                elif code == BINARY and data[0] == IN:
                    stdin.write(data[1:])
                    stdin.flush()
        with suppress(OSError):
            stdin.close()

    def _next(self) -> tuple[int, bytes] | None:
        read = self._handler.rfile.read
        head = read(2)
        if len(head) < 2:
            return None
        size = head[1] & 0x7F
        if size == 126:
            (size,) = struct.unpack("!H", read(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", read(8))
        mask, data = read(4), read(size)
        whole = int.from_bytes(data, "big") ^ int.from_bytes((mask * (size // 4 + 1))[:size], "big")
        return head[0] & 0x0F, whole.to_bytes(size, "big")


@contextmanager
def held_pods(
    kube: kube_server.KubeServer, directory: Path, mode: str = "hold", nodes: int = 2, *sets: str
) -> Iterator[HeldPods]:
    pods = HeldPods(kube, directory, mode, nodes, *sets)
    original = kube_server._Handler.do_GET

    def do_get(handler: kube_server._Handler) -> None:
        if "/exec?" in handler.path:
            handler.close_connection = True
            pods.exec(handler)
        else:
            original(handler)

    with mock.patch.object(kube_server._Handler, "do_GET", do_get):
        try:
            yield pods
        finally:
            pods.end()
