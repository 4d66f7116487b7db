"""A command in a pod, over a websocket of the API server: what it writes, what it is sent, how it ended.

Not by the client's own `stream`, which keeps all that was ever read in memory, reads on without an end while more
comes, takes Ctrl-C for an error and does not say why it was refused.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from llmtrain.errors import ClusterError

STDIN, STDOUT, STDERR, _VERDICT = 0, 1, 2, 3
MESSAGE_BYTES = 2**16  # of what a command complains about, the end is kept


class PodProcess:
    def __init__(self, websocket: Any, pod: str, explain: Callable[[Exception], ClusterError]) -> None:
        self._socket, self._pod, self._explain = websocket, pod, explain
        self._verdict = b""

    def output(self) -> Iterator[tuple[int, bytes]]:
        """What it writes as it comes: STDOUT or STDERR, and bytes. After that, `exit_code` is known."""
        from websocket import ABNF

        while True:
            try:
                code, frame = _next_frame(self._socket)
            except Exception as problem:  # the websocket's own, and the operating system's
                raise self._explain(problem) from None
            if code == ABNF.OPCODE_CLOSE:
                return
            data = frame.data if code in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) else b""
            if len(data) < 2:
                continue
            if data[0] in (STDOUT, STDERR):
                yield data[0], data[1:]
            elif data[0] == _VERDICT:
                self._verdict = (self._verdict + data[1:])[-MESSAGE_BYTES:]

    def write(self, data: bytes) -> None:
        """To its standard input, which it must have been given."""
        try:
            self._socket.send_binary(bytes([STDIN]) + data)
        except Exception as problem:
            raise self._explain(problem) from None

    @property
    def exit_code(self) -> int:
        said = self._said()
        if said.get("status") == "Success":
            return 0
        causes = (said.get("details") or {}).get("causes") or []
        code = next((row.get("message") for row in causes if row.get("reason") == "ExitCode"), None)
        if code is None:  # it could not even be started
            raise ClusterError(f"A command in {self._pod} failed: {said.get('message')}")
        return int(code)

    def check(self, complaint: bytes) -> None:
        """An error where the command failed, in its own last words."""
        if self._said().get("status") != "Success":
            words = complaint.decode("utf-8", "replace").strip().splitlines()
            raise ClusterError(
                f"A command in {self._pod} failed: {words[-1] if words else self._said().get('message')}"
            )

    def close(self) -> None:
        """At once: to close politely would read on what still comes. Another thread may be waiting for more: a socket
        that is only closed would not wake it."""
        open_socket = self._socket.sock
        if open_socket is not None:
            with suppress(OSError):
                socket.socket.shutdown(open_socket, socket.SHUT_RDWR)
        self._socket.shutdown()

    def _said(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._verdict))
        except ValueError:
            raise ClusterError(f"The connection to {self._pod} broke off.", remedy="Try again.") from None


def connect_within(seconds: float, connect: Callable[[], Any]) -> Any:
    """The connection that `connect` makes, or a TimeoutError. In a thread: the client sets no deadline, and takes
    none."""
    made: list[Any] = []
    failed: list[BaseException] = []
    lock, is_late = threading.Lock(), False

    def work() -> None:
        try:
            connection = connect()
        except BaseException as problem:
            failed.append(problem)
            return
        with lock:
            made.append(connection)
            if is_late:
                connection.shutdown()

    thread = threading.Thread(target=work, name="connect", daemon=True)
    thread.start()
    thread.join(seconds)
    with lock:
        is_late = not made and not failed
    if failed:
        raise failed[0]
    if is_late:
        raise TimeoutError(f"no connection within {seconds:.0f} s")
    return made[0]


def _next_frame(websocket: Any) -> Any:
    """Of a websocket that may be silent for long, but answers when it is asked whether it is still there."""
    from websocket import WebSocketTimeoutException

    try:
        return websocket.recv_data_frame(True)
    except WebSocketTimeoutException:
        websocket.ping()
    return websocket.recv_data_frame(True)
