"""Prometheus (extra `prometheus`): rank 0 serves its newest metrics on a port, as gauges with the label `run`."""

import importlib.util
import os
import time
from typing import Any

from llmtrain.env import LAUNCH
from llmtrain.errors import UsageError
from llmtrain.logs import log
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.generations import read_generations
from llmtrain.runs.heartbeats import read_heartbeats
from llmtrain.tracking.base import Metrics, Status, TrackedRun, Tracker

PATH = "/metrics"
HELP = {
    "step": "Steps trained so far.",
    "max_steps": "Steps of the whole run.",
    "seconds_left": "Estimated seconds until the last step.",
    "train_loss": "Training loss, the mean since the last logged step.",
    "val_loss": "Validation loss of the last evaluation.",
    "learning_rate": "Learning rate of the last logged step.",
    "gradient_norm": "Norm of the gradient of the last logged step.",
    "tokens": "Target tokens trained on so far.",
    "tokens_per_second": "Training speed over all processes.",
    "mfu": "Model FLOPs utilization, from 0 to 1.",
    "peak_memory_bytes": "Peak GPU memory of rank 0.",
    "world_size": "Number of processes.",
    "restarts": "Starts of the run after the first.",
    "heartbeat_age_seconds": "Age of the oldest heartbeat of any rank.",
}
METRICS = {
    "train_loss": "train/loss",
    "val_loss": "val/loss",
    "learning_rate": "train/lr",
    "gradient_norm": "train/grad_norm",
    "tokens": "train/tokens",
    "tokens_per_second": "train/tokens_per_second",
    "mfu": "train/mfu",
    "peak_memory_bytes": "train/peak_memory_bytes",
}
"""Gauge -> the metric that it shows."""
HEARTBEATS_SEC = 5.0
"""Heartbeats are read at most this often, however often Prometheus asks."""


class PrometheusTracker(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        check_installed()
        from prometheus_client import CollectorRegistry, start_http_server

        self._run_id = run.directory.run_id
        self._registry: Any = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._set("step", run.resumed_from)
        self._set("max_steps", run.config.trainer.steps)
        self._set("restarts", max(0, len(read_generations(run.directory)) - 1))
        self._set("world_size", run.facts["world_size"])
        self._gauge("heartbeat_age_seconds").set_function(_HeartbeatAges(run.directory).oldest)
        options = run.config.tracking.prometheus
        host = options.host or ("0.0.0.0" if LAUNCH in os.environ else "127.0.0.1")
        self._server, self._thread = start_http_server(options.port, host, self._registry)
        log("TRAIN", f"Prometheus metrics at http://{host}:{options.port}{PATH}")

    def step(self, step: int, seconds_left: float | None) -> None:
        self._set("step", step)
        if seconds_left is not None:
            self._set("seconds_left", seconds_left)

    def log(self, step: int, metrics: Metrics) -> None:
        self._set("step", step)
        for name, metric in METRICS.items():
            if metric in metrics:
                self._set(name, metrics[metric])

    def finish(self, status: Status, result: dict[str, Any] | None) -> None:  # noqa: ARG002
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _set(self, name: str, value: float) -> None:
        self._gauge(name).set(value)

    def _gauge(self, name: str) -> Any:
        """Created on use, so that it has no value before its first one, rather than 0."""
        from prometheus_client import Gauge

        if name not in self._gauges:
            made = Gauge(name, HELP[name], ["run"], namespace="llmtrain", registry=self._registry)
            self._gauges[name] = made.labels(self._run_id)
        return self._gauges[name]


class _HeartbeatAges:
    def __init__(self, run: RunDirectory) -> None:
        self._run, self._read_at, self._oldest = run, 0.0, time.time()

    def oldest(self) -> float:
        """Seconds since the oldest heartbeat of any rank, by the clock of the machine that wrote it."""
        if time.monotonic() - self._read_at > HEARTBEATS_SEC:
            self._read_at = time.monotonic()
            times = [beat.get("time") for beat in read_heartbeats(self._run.heartbeats).values()]
            numbers = [at for at in times if isinstance(at, int | float)]
            self._oldest = min(numbers, default=self._oldest)
        return max(0.0, time.time() - self._oldest)


def check_installed() -> None:
    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError(
            "tracking.prometheus.port is set, but prometheus_client is not installed.",
            remedy="pip install 'llmtrain[prometheus]', or set tracking.prometheus.port to null.",
        )
