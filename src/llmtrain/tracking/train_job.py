"""Progress of a TrainJob: Kubeflow Trainer 2.2 and later (feature gate TrainJobStatus) gives pods the URL of a server
that writes what rank 0 reports to the status of the TrainJob, where kubectl shows it.

The server accepts POST requests with a bearer token that is rotated in its file. It asks for at most one every 5 s.
"""

import json
import math
import os
import ssl
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from llmtrain.core.logs import warn
from llmtrain.core.redact import redacted_line
from llmtrain.runs.state import EndStatus
from llmtrain.tracking.base import Metrics, TrackedRun, Tracker

URL = "KUBEFLOW_TRAINER_SERVER_URL"
CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
"""The last two are paths of files."""
PORT = 10443
"""Default port of the server."""
INTERVAL_SEC = 5.0
ANSWER_SEC = 5.0
MAX_ANSWER_BYTES = 1 << 16
# Limits of the API.
NAME_LIMIT = 64
METRICS_LIMIT = 256


class TrainJobTracker(Tracker):
    """A thread reports the newest values; an unreachable server only causes a warning."""

    def __init__(self, run: TrackedRun) -> None:
        self._max_steps = run.config.trainer.steps
        self._step = run.resumed_from
        self._seconds_left: float | None = None
        self._metrics: Metrics = {}
        self._change = threading.Event()
        self._end = threading.Event()
        self._has_warned = False
        self._thread = threading.Thread(target=self._work, name="trainjob-status", daemon=True)
        self._thread.start()

    def step(self, step: int, seconds_left: float | None) -> None:
        self._step = step
        self._seconds_left = seconds_left
        self._change.set()

    def log(self, step: int, metrics: Metrics) -> None:
        self._step = step
        self._metrics = {**self._metrics, **metrics}
        self._change.set()

    def finish(self, status: EndStatus, result: dict[str, Any] | None) -> None:  # noqa: ARG002
        if status == EndStatus.FINISHED:
            # Also of a run that stopped early.
            self._step = self._max_steps
            self._seconds_left = 0.0
        self._end.set()
        self._change.set()
        self._thread.join(ANSWER_SEC + 1)

    def _work(self) -> None:
        while not self._end.is_set():
            self._change.wait()
            self._change.clear()
            self._report()
            self._end.wait(INTERVAL_SEC)
        if self._change.is_set():
            self._report()

    def _report(self) -> None:
        try:
            send(trainer_status(self._step, self._max_steps, self._seconds_left, self._metrics))
        except Exception as problem:  # of the network, the server or the files
            if not self._has_warned:
                message = redacted_line(problem, 200)
                warn("TRAIN", f"the progress of the TrainJob could not be reported; training continues: {message}")
            self._has_warned = True


def trainer_status(step: int, max_steps: int, seconds_left: float | None, metrics: Metrics) -> dict[str, Any]:
    values = [(name, value) for name, value in metrics.items() if math.isfinite(value) and len(name) <= NAME_LIMIT]
    status: dict[str, Any] = {
        "progressPercentage": min(100, 100 * step // max(1, max_steps)),
        "metrics": [{"name": name, "value": f"{value:.6g}"} for name, value in values[:METRICS_LIMIT]],
        "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return status if seconds_left is None else {**status, "estimatedRemainingSeconds": max(0, round(seconds_left))}


def send(status: dict[str, Any]) -> None:
    """The files are read each time: the token is valid for an hour, and certificates are rotated."""
    url = os.environ[URL]
    body = json.dumps({"trainerStatus": status}).encode()
    request = Request(url, body, {"Content-Type": "application/json"}, method="POST")
    if TOKEN in os.environ:
        token = Path(os.environ[TOKEN]).read_text(encoding="utf-8").strip()
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    trusted = HTTPSHandler(context=ssl.create_default_context(cafile=os.environ.get(CA_CERT)))
    opener = build_opener(ProxyHandler({}), trusted)  # a Service of the cluster needs no proxy
    with opener.open(request, timeout=ANSWER_SEC) as answer:
        answer.read(MAX_ANSWER_BYTES)
