"""Prometheus (extra `prometheus`): rank 0 serves its newest metrics on a port, as gauges with the label `run`."""

import importlib.util
import os
import time
from typing import Any

from llmtrain.core.env import LAUNCH
from llmtrain.core.install import install_command
from llmtrain.core.logs import log
from llmtrain.errors import UsageError
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.state import EndStatus
from llmtrain.runs.view import RunView
from llmtrain.tracking.base import Metrics, TrackedRun, Tracker

PATH = "/metrics"
HELP = {
    "step": "Steps trained so far.",
    "max_steps": "Steps of the whole run.",
    "seconds_left": "Estimated seconds until the last step.",
    "train_loss": "Training loss, the mean since the last logged step.",
    "val_loss": "Validation loss of the last evaluation.",
    "learning_rate": "Learning rate of the last logged step.",
    "train_accuracy": "Share of training pairs whose chosen answer has the higher reward.",
    "val_accuracy": "Share of validation pairs whose chosen answer has the higher reward.",
    "gradient_norm": "Norm of the gradient of the last logged step.",
    "tokens": "Target tokens trained on so far.",
    "tokens_per_second": "Training speed over all processes.",
    "mfu": "Model FLOPs utilization, from 0 to 1.",
    "peak_memory_bytes": "Peak GPU memory of rank 0.",
    "world_size": "Number of processes.",
    "restarts": "Starts of the run after the first.",
    "heartbeat_age_seconds": "Age of the oldest heartbeat of any rank.",
    "checkpoint_age_seconds": "Age of the newest checkpoint; before the first one, time since the start.",
}
METRICS = {
    "train_loss": "train/loss",
    "val_loss": "val/loss",
    "train_accuracy": "train/accuracy",
    "val_accuracy": "val/accuracy",
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
        self._set("restarts", max(0, len(RunView(run.directory).generations) - 1))
        self._set("world_size", run.facts["world_size"])
        self._saved_at = _newest_checkpoint(run) or time.time()
        self._gauge("checkpoint_age_seconds").set_function(self._checkpoint_age)
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

    def saved(self, step: int) -> None:  # noqa: ARG002
        self._saved_at = time.time()

    def _checkpoint_age(self) -> float:
        return max(0.0, time.time() - self._saved_at)

    def finish(self, status: EndStatus, result: dict[str, Any] | None) -> None:  # noqa: ARG002
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


def _newest_checkpoint(run: TrackedRun) -> float | None:
    """When the checkpoint that the run resumes from was written; None for a new run."""
    if not run.resumed_from:
        return None
    try:
        return (run.directory.checkpoints / f"step_{run.resumed_from}").stat().st_mtime
    except OSError:
        return None


class _HeartbeatAges:
    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._read_at = 0.0
        self._oldest = time.time()

    def oldest(self) -> float:
        """Seconds since the oldest heartbeat of any rank, by the clock of the machine that wrote it."""
        if time.monotonic() - self._read_at > HEARTBEATS_SEC:
            self._read_at = time.monotonic()
            ages = [rank.age for rank in RunView(self._run).ranks()]
            if ages:
                self._oldest = time.time() - max(ages)
        return max(0.0, time.time() - self._oldest)


def check_installed() -> None:
    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError(
            "tracking.prometheus.port is set, but prometheus_client is not installed.",
            remedy=f"{install_command('prometheus')}, or set tracking.prometheus.port to null.",
        )
