"""TrainJob progress: what the status server of Kubeflow Trainer receives, over TLS and with a token."""

import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from limits import limit
from llmtrain.config.schema import Config
from llmtrain.runs.directory import RunDirectory
from llmtrain.tracking import train_job
from llmtrain.tracking.base import TrackedRun
from llmtrain.tracking.train_job import CA_CERT, TOKEN, URL, TrainJobTracker, trainer_status

STATUS_PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/first/status"


class StatusServer:
    """Speaks the protocol of Kubeflow Trainer's pkg/statusserver: checks path, token and the limits of the API."""

    def __init__(self, directory: Path) -> None:
        self.received: list[dict[str, Any]] = []
        self.changed = threading.Condition()
        self.token = directory / "token"
        self.token.write_text("first-token\n")
        self.certificate, key = directory / "ca.crt", directory / "key.pem"
        command = (
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
        )
        extra = ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", self.certificate]
        subprocess.run([*command.split(), *map(str, extra)], check=True, capture_output=True)
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                is_right = self.headers["Authorization"] == f"Bearer {owner.token.read_text().strip()}"
                code = owner.code(self.path, is_right, body)
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())
                with owner.changed:
                    owner.received.append({"code": code, **body})
                    owner.changed.notify_all()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"https://localhost:{self._server.server_port}{STATUS_PATH}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def code(self, path: str, is_right: bool, body: dict[str, Any]) -> int:
        if path != STATUS_PATH:
            return 404
        if not is_right:
            return 403
        status = body["trainerStatus"]
        percentage, left = status["progressPercentage"], status.get("estimatedRemainingSeconds", 0)
        is_valid = type(percentage) is int and 0 <= percentage <= 100 and type(left) is int and left >= 0
        rows = status["metrics"]
        is_valid &= all(isinstance(row["value"], str) and 0 < len(row["value"]) <= 64 for row in rows)
        return 200 if is_valid and all(0 < len(row["name"]) <= 64 for row in rows) and len(rows) <= 256 else 422

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.received) >= count, timeout=limit(60))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatusServer]:
    made = StatusServer(tmp_path)
    monkeypatch.setenv(URL, made.url)
    monkeypatch.setenv(CA_CERT, str(made.certificate))
    monkeypatch.setenv(TOKEN, str(made.token))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # a proxy of the image is not asked
    yield made
    made.close()


def tracked(tmp_path: Path) -> TrackedRun:
    return TrackedRun(RunDirectory(tmp_path / "first"), Config().with_values("trainer", max_steps=200), 0, 0, {})


def test_progress_is_reported(server: StatusServer, tmp_path: Path) -> None:
    tracker = TrainJobTracker(tracked(tmp_path))
    tracker.log(50, {"train/loss": 2.5, "val/loss": float("nan")})
    server.wait_for(1)
    server.token.write_text("rotated\n")
    tracker.step(150, 61.7)
    tracker.finish("finished", None)
    assert [row["code"] for row in server.received] == [200] * len(server.received)
    first, last = server.received[0]["trainerStatus"], server.received[-1]["trainerStatus"]
    assert first["progressPercentage"] == 25
    assert first["metrics"] == [{"name": "train/loss", "value": "2.5"}]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    assert first["lastUpdatedTime"].endswith("+00:00")


def test_many_steps_are_few_requests(server: StatusServer, tmp_path: Path) -> None:
    tracker = TrainJobTracker(tracked(tmp_path))
    for step in range(1, 151):
        tracker.step(step, 5.0)
    tracker.finish("stopped", None)
    assert 1 <= len(server.received) <= 3
    assert server.received[-1]["trainerStatus"]["progressPercentage"] == 75


@pytest.mark.parametrize("problem", ["wrong token", "no file", "unreachable"])
def test_failed_report_stops_nothing(
    server: StatusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(train_job, "warn", lambda _, text: warnings.append(text))
    if problem == "wrong token":
        (tmp_path / "other").write_text("x")
        monkeypatch.setenv(TOKEN, str(tmp_path / "other"))
    elif problem == "no file":
        monkeypatch.setenv(CA_CERT, str(tmp_path / "none"))
    else:
        monkeypatch.setenv(URL, "https://127.0.0.1:9/status")
    tracker = TrainJobTracker(tracked(tmp_path))
    tracker.log(1, {"train/loss": 1.0})
    tracker.finish("failed", None)
    assert len(warnings) == 1
    assert [row["code"] for row in server.received] == [403] * len(server.received)


def test_status_keeps_the_limits_of_the_api() -> None:
    metrics = {f"{'x' * 70}{number}" if number == 3 else f"m{number}": 1e300 for number in range(300)}
    status = trainer_status(7, 3, -2.0, metrics)
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (100, 0)
    assert len(status["metrics"]) == 256
    assert max(len(row["name"]) for row in status["metrics"]) <= 64
    assert "estimatedRemainingSeconds" not in trainer_status(1, 3, None, {})


def test_token_is_not_sent_to_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, self.headers["Authorization"]))
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self) -> None:
            received.append((self.path, self.headers["Authorization"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * (train_job.MAX_ANSWER_BYTES + 1))

        def log_message(self, *_: object) -> None:
            pass

    (tmp_path / "token").write_text("secret")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        monkeypatch.setenv(URL, f"http://127.0.0.1:{server.server_port}/status")
        monkeypatch.setenv(TOKEN, str(tmp_path / "token"))
        monkeypatch.delenv(CA_CERT, raising=False)
        train_job.send({})
        server.shutdown()
    assert received == [("/status", "Bearer secret"), ("/elsewhere", None)]
