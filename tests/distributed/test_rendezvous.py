import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from limits import limit
from llmtrain.distributed.rendezvous import REMEDIES, deadline_sec, wait_for_master
from llmtrain.errors import JoinError, UsageError


@pytest.fixture
def master() -> Iterator[socket.socket]:
    """Bound, not listening: its port is taken, and refuses connections until `listen` is called."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        yield server


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("llmtrain"), "propagate", True)
    caplog.set_level(logging.INFO, "llmtrain")
    return caplog


def failed(host: str, port: int, timeout_sec: float) -> JoinError:
    """The error, raised within a second of the deadline."""
    started = time.monotonic()
    with pytest.raises(JoinError) as caught:
        wait_for_master(host, port, timeout_sec)
    took = time.monotonic() - started
    assert timeout_sec - 0.05 <= took < timeout_sec + limit(1)
    error = caught.value
    assert error.exit_code == 69
    assert host in str(error)
    assert str(port) in str(error)
    waited = error.details["waited_sec"]
    assert isinstance(waited, float)
    assert abs(waited - took) < limit(0.2)
    assert error.remedy == REMEDIES[str(error.details["failed"])]
    assert (error.details["host"], error.details["port"]) == (host, port)
    return error


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_listening_master(master: socket.socket, host: str) -> None:
    master.listen()
    assert wait_for_master(host, port_of(master), 60) < limit(1)


def test_late_master(master: socket.socket) -> None:
    timer = threading.Timer(0.5, master.listen)
    timer.start()
    assert 0.5 <= wait_for_master("127.0.0.1", port_of(master), 60) < limit(3)
    timer.join()


def test_name_that_resolves_late(master: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    master.listen()
    real, since = socket.getaddrinfo, time.monotonic()

    def late(_host: str, *rest: object, **more: object) -> object:
        if time.monotonic() - since < 0.5:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1", *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", late)
    assert 0.4 <= wait_for_master("train-0.train", port_of(master), 60) < limit(3)


def test_refused_connection(master: socket.socket) -> None:
    error = failed("127.0.0.1", port_of(master), 0.7)
    assert error.details["failed"] == "refused"
    assert "refused" in str(error)


def test_refused_on_every_address_of_a_name(master: socket.socket) -> None:
    assert failed("localhost", port_of(master), 0.3).details["failed"] == "refused"


@pytest.mark.parametrize("host", ["train-0.invalid", "a" * 70 + ".invalid"])
def test_unresolvable_name(host: str) -> None:
    error = failed(host, 29500, 0.6)
    assert error.details["failed"] == "name"
    assert "publishNotReadyAddresses" in str(error)


def test_silent_dns_server_keeps_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(limit(30)))
    error = failed("train-0.train", 29500, 0.5)
    release.set()
    assert error.details["failed"] == "name"
    assert "no answer from DNS" in str(error)


def test_full_listen_queue_times_out(master: socket.socket) -> None:
    """A listening socket with a full queue drops connections: the client gets no answer."""
    master.listen(0)
    clients = []
    for _ in range(4):
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex(master.getsockname())
        clients.append(client)
    time.sleep(0.1)
    error = failed("127.0.0.1", port_of(master), 0.6)
    for client in clients:
        client.close()
    assert error.details["failed"] == "timeout"
    assert "NetworkPolicy" in str(error)


def test_address_without_route() -> None:
    """TCP to the broadcast address: the kernel refuses it without sending a packet."""
    error = failed("255.255.255.255", 29500, 0.3)
    assert error.details["failed"] == "no_route"
    assert "no route" in str(error)


def test_progress_is_logged(master: socket.socket, lines: pytest.LogCaptureFixture) -> None:
    with pytest.raises(JoinError):
        wait_for_master("127.0.0.1", port_of(master), 1.0, progress_sec=0.3)
    records = [record for record in lines.records if record.__dict__.get("tag") == "DDP"]
    assert 2 <= len(records) <= 4
    assert all("connection refused by 127.0.0.1" in record.getMessage() for record in records)
    assert "of 1 s" in records[0].getMessage()


def test_no_progress_line_for_a_short_wait(master: socket.socket, lines: pytest.LogCaptureFixture) -> None:
    master.listen()
    wait_for_master("127.0.0.1", port_of(master), 5)
    assert not lines.records


@pytest.mark.parametrize(("text", "expected"), [(None, 600.0), ("", 600.0), ("5", 5.0), (" 0.5 ", 0.5)])
def test_environment_overrides_config(text: str | None, expected: float) -> None:
    environ = {} if text is None else {"LLMTRAIN_DIST_TIMEOUT": text}
    assert deadline_sec(("LLMTRAIN_DIST_TIMEOUT",), 600, environ) == expected


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf", "10s"])
def test_invalid_deadline_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="LLMTRAIN_MASTER_READY_TIMEOUT"):
        deadline_sec(("LLMTRAIN_MASTER_READY_TIMEOUT",), 600, {"LLMTRAIN_MASTER_READY_TIMEOUT": text})
