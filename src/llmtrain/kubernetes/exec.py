"""A command in a pod over a websocket of the API server (kubectl exec).

The client's own `stream` is not used: it keeps all output in memory, does not return while output keeps coming, treats
Ctrl-C as an error and hides why a request was refused.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from llmtrain.errors import ClusterError

# Channels of the protocol: the first byte of each frame.
STDIN = 0
STDOUT = 1
STDERR = 2
_STATUS = 3
MESSAGE_BYTES = 2**16  # kept from the end of standard error


class PodProcess:
    def __init__(self, websocket: Any, pod: str, to_error: Callable[[Exception], ClusterError]) -> None:
        self._socket = websocket
        self._pod = pod
        self._to_error = to_error
        self._status = b""

    def output(self) -> Iterator[tuple[int, bytes]]:
        """(STDOUT or STDERR, bytes), streamed. Afterwards `exit_code` is known."""
        from websocket import ABNF

        while True:
            try:
                code, frame = _next_frame(self._socket)
            except Exception as problem:  # of the websocket library, or an OSError
                raise self._to_error(problem) from None
            if code == ABNF.OPCODE_CLOSE:
                return
            if code not in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT):  # a pong
                continue
            data = frame.data
            if len(data) < 2:  # only the channel: sent first, to show that it exists
                continue
            if data[0] in (STDOUT, STDERR):
                yield data[0], data[1:]
            elif data[0] == _STATUS:
                self._status = (self._status + data[1:])[-MESSAGE_BYTES:]

    def write(self, data: bytes) -> None:
        """Write to standard input, which must have been requested."""
        try:
            self._socket.send_binary(bytes([STDIN]) + data)
        except Exception as problem:
            raise self._to_error(problem) from None

    @property
    def exit_code(self) -> int:
        status = self._read_status()
        if status.get("status") == "Success":
            return 0
        for cause in (status.get("details") or {}).get("causes") or []:
            if cause.get("reason") == "ExitCode" and cause.get("message"):
                return int(cause["message"])
        # It was not started.
        raise ClusterError(f"A command in pod {self._pod} failed: {status.get('message')}")

    def check(self, errors: bytes) -> None:
        """Raise an error with the last line of `errors` (standard error) if the command failed."""
        status = self._read_status()
        if status.get("status") == "Success":
            return
        lines = errors.decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1] if lines else status.get("message")
        raise ClusterError(f"A command in pod {self._pod} failed: {reason}")

    def close(self) -> None:
        """Close at once: a closing handshake would read all remaining output. The socket is shut down first, because
        closing alone does not wake a thread that waits for data."""
        open_socket = self._socket.sock
        if open_socket is not None:
            with suppress(OSError):
                socket.socket.shutdown(open_socket, socket.SHUT_RDWR)
        self._socket.shutdown()

    def _read_status(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._status))
        except ValueError:
            raise ClusterError(f"The connection to pod {self._pod} was lost.", remedy="Retry.") from None


def connect_within(seconds: float, connect: Callable[[], Any]) -> Any:
    """The result of `connect`, or a TimeoutError. In a thread, because the client has no timeout for this."""
    connected: list[Any] = []
    failed: list[BaseException] = []
    lock = threading.Lock()
    is_late = False

    def work() -> None:
        try:
            connection = connect()
        except BaseException as problem:
            failed.append(problem)
            return
        with lock:
            connected.append(connection)
            if is_late:  # the caller no longer waits for it
                connection.shutdown()

    thread = threading.Thread(target=work, name="connect", daemon=True)
    thread.start()
    thread.join(seconds)
    with lock:
        is_late = not connected and not failed
    if failed:
        raise failed[0]
    if is_late:
        raise TimeoutError(f"no connection within {seconds:.0f} s")
    return connected[0]


def _next_frame(websocket: Any) -> Any:
    """The next frame. A command may print nothing for long, so a timeout is only an error if a ping is not answered."""
    from websocket import WebSocketTimeoutException

    try:
        return websocket.recv_data_frame(True)
    except WebSocketTimeoutException:
        websocket.ping()
    return websocket.recv_data_frame(True)
