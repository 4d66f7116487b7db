"""MLflow (extra `mlflow`), in a thread of its own: a slow or dead server costs training nothing.

The id of the MLflow run is kept in the run directory, so that a resumed run goes on in the same one.
"""

import importlib.util
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmtrain.config.schema import Config
from llmtrain.errors import UsageError
from llmtrain.logs import warn
from llmtrain.runs.atomic import read_json, write_json
from llmtrain.runs.redact import redact
from llmtrain.tracking.base import Metrics, NullTracker, Status, TrackedRun

FLUSH_SEC = 30.0
FLUSH_WHEN_STOPPED_SEC = 5.0  # a pod that is told to stop has little time left
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
# MLflow's own defaults try a dead server for minutes, and send usage figures to its makers.
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}


class MlflowTracker(NullTracker):
    def __init__(self, run: TrackedRun) -> None:
        check_installed()
        self._run = run
        self._client: Any = None
        self._run_id = ""
        self._dead = False
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._jobs.put(self._open)
        self._thread.start()

    def log(self, step: int, metrics: Metrics) -> None:
        now = int(time.time() * 1000)
        self._jobs.put(lambda: self._log_batch(step, metrics, now))

    def samples(self, step: int, path: Path) -> None:  # noqa: ARG002
        self._jobs.put(lambda: self._client.log_artifact(self._run_id, str(path), artifact_path="samples"))

    def finish(self, status: Status, result: dict[str, Any] | None) -> None:
        self._jobs.put(lambda: self._close(status, result))
        self._jobs.put(None)
        patience = FLUSH_SEC if status == "finished" else FLUSH_WHEN_STOPPED_SEC
        self._thread.join(patience)
        if self._thread.is_alive() and not self._dead:
            warn("TRAIN", f"MLflow did not take everything within {patience:.0f} s; metrics.jsonl has it all")

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._dead:
                continue
            try:
                job()
            except Exception as problem:
                self._dead = True
                text = redact(" ".join(str(problem).split()))[:200]
                warn("TRAIN", f"MLflow is lost; training goes on and metrics.jsonl keeps everything: {text}")

    def _open(self) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)  # they tell of every table they make
        uri, artifacts = tracking_location(self._run.config)
        self._client = MlflowClient(tracking_uri=uri)
        if not self._reopen(uri):
            self._create(uri, artifacts)

    def _create(self, uri: str, artifacts: str | None) -> None:
        config, run_id = self._run.config.mlflow, self._run.directory.run_id
        found = self._client.get_experiment_by_name(config.experiment)
        experiment = (
            found.experiment_id
            if found
            else self._client.create_experiment(config.experiment, artifact_location=artifacts)
        )
        made = self._client.create_run(experiment, run_name=config.run_name or run_id, tags={"llmtrain.run_id": run_id})
        self._run_id = made.info.run_id
        self._describe(uri)

    def _reopen(self, uri: str) -> bool:
        """Go on in the MLflow run that an earlier start made, unless it was made in another store."""
        known = read_json(self._run.directory.mlflow)
        if not isinstance(known, dict) or known.get("tracking_uri") != redact(uri):
            return False
        self._run_id = str(known.get("run_id"))
        try:
            self._client.update_run(self._run_id, status="RUNNING")
        except Exception:  # deleted there, or the server is gone: making a new one will tell
            return False
        if not known.get("described"):  # killed while it was being described
            self._describe(uri)
        return True

    def _describe(self, uri: str) -> None:
        """Parameters, config and metadata; the note in the run directory says whether all of it arrived."""
        note = {"run_id": self._run_id, "tracking_uri": redact(uri)}
        write_json(self._run.directory.mlflow, {**note, "described": False})
        self._log_params()
        for path in (self._run.directory.config, self._run.directory.meta):
            if path.is_file():
                self._client.log_artifact(self._run_id, str(path))
        write_json(self._run.directory.mlflow, {**note, "described": True})

    def _log_params(self) -> None:
        from mlflow.entities import Param

        values = {
            f"{s}.{f}": v
            for s, fields in self._run.config.as_dict().items()
            if isinstance(fields, dict)
            for f, v in fields.items()
        }
        params = [Param(name, redact(str(value))) for name, value in {**values, **self._run.facts}.items()]
        for start in range(0, len(params), 100):  # the server takes 100 at a time
            self._client.log_batch(self._run_id, params=params[start : start + 100])

    def _log_batch(self, step: int, metrics: Metrics, now: int) -> None:
        from mlflow.entities import Metric

        self._client.log_batch(self._run_id, metrics=[Metric(k, v, now, step) for k, v in metrics.items()])

    def _close(self, status: Status, result: dict[str, Any] | None) -> None:
        best = (result or {}).get("best_checkpoint")
        if best and self._run.config.mlflow.log_models:
            self._client.log_artifacts(self._run_id, best, artifact_path="best_checkpoint")
        if status != "superseded":  # then the run goes on, in another process
            self._client.set_terminated(self._run_id, status=_STATUS[status])


def check_installed() -> None:
    if importlib.util.find_spec("mlflow") is None:
        raise UsageError(
            "mlflow.enabled is true, but mlflow is not installed.",
            remedy="pip install 'llmtrain[mlflow]', or set mlflow.enabled to false.",
        )


def tracking_location(config: Config) -> tuple[str, str | None]:
    """(tracking URI, artifact location or None for the server's own). The config wins over the environment.

    A plain directory, and the default, become a sqlite file in it with artifacts beside.
    """
    uri = config.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or config.output.root_dir
    if uri.startswith("databricks") or ("://" in uri and not uri.startswith(("sqlite:", "file:"))):
        return uri, None
    if uri.startswith("sqlite:"):
        folder = Path(uri.removeprefix("sqlite:///")).expanduser().absolute().parent
        return uri, (folder / "mlartifacts").as_uri()
    folder = Path(uri.removeprefix("file://").removeprefix("file:")).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}", (folder / "mlartifacts").as_uri()
