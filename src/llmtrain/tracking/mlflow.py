"""MLflow (extra `mlflow`), in a separate thread: a slow or unreachable server does not delay training.

The id of the MLflow run is stored in the run directory, so that a resumed run continues in it. A resumed run first
sends the rows of metrics.jsonl that the server did not receive before the interruption, then skips the steps that the
server already has: steps after the newest checkpoint are trained twice. If a process was killed after the end of
training but before everything was sent, the next start completes it.
"""

import importlib.util
import logging
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from llmtrain.config.tracking import MlflowSection
from llmtrain.core.files import read_json, write_json
from llmtrain.core.install import install_command
from llmtrain.core.logs import log, warn
from llmtrain.core.redact import HIDDEN_LOGIN, redact
from llmtrain.errors import UsageError
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.state import EndStatus
from llmtrain.runs.view import RunView
from llmtrain.tracking.background import BackgroundTracker
from llmtrain.tracking.base import Metrics, TrackedRun
from llmtrain.tracking.parameters import flat_parameters
from llmtrain.tracking.rows import TrackedRow, read_rows

if TYPE_CHECKING:
    from mlflow.entities import Metric

ALLOW = "MLFLOW_ALLOW_FILE_STORE"  # of MLflow: allows a directory as a store
RUN_ID_TAG = "llmtrain.run_id"
GROUP_TAG = "llmtrain.group"
_LOSSES = ("train/loss", "val/loss")
# Limits of one request.
METRICS_AT_ONCE = 1000
PARAMS_AT_ONCE = 100
_STATUS = {EndStatus.FINISHED: "FINISHED", EndStatus.STOPPED: "KILLED", EndStatus.FAILED: "FAILED"}
# By default MLflow retries an unreachable server for minutes, and sends telemetry.
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # standard output is for results
    "GIT_PYTHON_REFRESH": "quiet",
}


class MlflowTracker(BackgroundTracker):
    title = "MLflow"

    def __init__(self, run: TrackedRun) -> None:
        check_installed()
        self._run = run
        section = run.config.tracking.mlflow
        self._location = tracking_location(section, run.config.output.root_dir)
        _log_location(section.tracking_uri, self._location[0])
        self._mlflow_run: MlflowRun
        # Read here, before training appends to it; the JSONL tracker has dropped rows that will be repeated.
        self._earlier = read_rows(RunView(run.directory)) if run.resumed_from else []
        super().__init__(self._open)

    def log(self, step: int, metrics: Metrics) -> None:
        now = int(time.time() * 1000)
        self._later(lambda: self._mlflow_run.add([(step, metrics, now)]))

    def samples(self, step: int, path: Path) -> None:  # noqa: ARG002
        self._later(
            lambda: self._mlflow_run.client.log_artifact(self._mlflow_run.id, str(path), artifact_path="samples")
        )

    def finish(self, status: EndStatus, result: dict[str, Any] | None) -> None:
        self._finish(status, lambda: self._close(status, result))

    def _open(self) -> None:
        run = self._run
        self._mlflow_run = MlflowRun(run, self._location)
        if self._mlflow_run.reopen():
            self._mlflow_run.read_history()
        else:
            self._mlflow_run.create()
        self._mlflow_run.add(self._earlier)

    def _close(self, status: EndStatus, result: dict[str, Any] | None) -> None:
        best = (result or {}).get("best_checkpoint")
        if best and self._run.config.tracking.mlflow.log_models:
            self._mlflow_run.client.log_artifacts(self._mlflow_run.id, best, artifact_path="best_checkpoint")
        if status == EndStatus.FINISHED:
            self._mlflow_run.log_report()
        if status != EndStatus.SUPERSEDED:  # else the run continues in another process
            self._mlflow_run.end(status)


class MlflowRun:
    """The MLflow run of a run directory. The live tracker and the replay of a finished run both write through it, so
    their results are the same."""

    def __init__(self, run: TrackedRun, location: tuple[str, str | None], is_home: bool = True) -> None:
        """`is_home`: the run directory records this store, and a resumed run continues in it."""
        uri, self._artifacts = location
        self._directory = run.directory
        self._section = run.config.tracking.mlflow
        self._run = run
        self._uri = without_login(redact(uri))
        self._is_home = is_home
        store_directory = local_directory(uri)
        if store_directory is not None and uri.startswith("sqlite:"):
            store_directory.mkdir(parents=True, exist_ok=True)
        self.client = _client(uri)
        self.id = ""
        self._stored: dict[tuple[str, int], set[str]] = {}  # (metric, step) -> values, as text because nan != nan

    def reopen(self) -> bool:
        """Continue the MLflow run of an earlier start, unless it is in another store."""
        record = self._read_record()
        if without_login(str(record.get("tracking_uri"))) != self._uri or not self.take(str(record.get("run_id"))):
            return False
        if not record.get("described"):  # killed during `describe`
            self.describe()
        else:
            self._write_record(described=True)  # not complete any more
        return True

    def find(self) -> bool:
        """Continue the run of the experiment that is tagged with this run id."""
        experiment = self.client.get_experiment_by_name(self._section.experiment)
        if experiment is None:
            return False
        condition = f"tags.`{RUN_ID_TAG}` = '{self._directory.run_id}'"
        runs = self.client.search_runs([experiment.experiment_id], condition, max_results=1)
        return bool(runs) and self.take(runs[0].info.run_id)

    def take(self, mlflow_id: str) -> bool:
        try:
            self.client.update_run(mlflow_id, status="RUNNING")
        except Exception:  # deleted, or the server is unreachable: `create` will show
            return False
        self.id = mlflow_id
        return True

    def create(self, started_at_ms: int | None = None) -> None:
        section = self._section
        run_id = self._directory.run_id
        existing = self.client.get_experiment_by_name(section.experiment)
        if existing:
            experiment = existing.experiment_id
        else:
            experiment = self.client.create_experiment(section.experiment, artifact_location=self._artifacts)
        tags = {RUN_ID_TAG: run_id}
        group = self._run.config.tracking.group
        if group is not None:
            tags[GROUP_TAG] = group
        created = self.client.create_run(
            experiment, start_time=started_at_ms, run_name=redact(section.run_name or run_id), tags=tags
        )
        self.id = created.info.run_id
        self.describe()

    def describe(self) -> None:
        """Log parameters, config and metadata; the record in the run directory shows whether that was completed."""
        self._write_record(described=False)
        self._log_params()
        for path in (self._directory.config, self._directory.meta):
            if path.is_file():
                self.client.log_artifact(self.id, str(path))
        self._write_record(described=True)

    def read_history(self) -> None:
        """Read which steps the store has."""
        for name in self.client.get_run(self.id).data.metrics:
            for metric in self.client.get_metric_history(self.id, name):
                self._stored.setdefault((metric.key, metric.step), set()).add(repr(float(metric.value)))

    def add(self, rows: Sequence[TrackedRow]) -> int:
        """Log the values that the store does not have, and return their number."""
        metrics: list[Metric] = []
        for step, values, at in rows:
            metrics += as_metrics(step, self._missing(step, values), at)
        for start in range(0, len(metrics), METRICS_AT_ONCE):
            self.client.log_batch(self.id, metrics=metrics[start : start + METRICS_AT_ONCE])
        return len(metrics)

    def _missing(self, step: int, values: Metrics) -> Metrics:
        """The metrics to send. A step whose losses are stored with the same values is a repeated step: its other
        metrics, such as throughput, would be second points at the same step. New losses are always sent."""

        def has(name: str) -> bool:
            return repr(float(values[name])) in self._stored.get((name, step), ())

        is_repeated = all(has(name) for name in _LOSSES if name in values)
        missing = {}
        for name, value in values.items():
            is_stored = (name, step) in self._stored
            if not has(name) and not (is_repeated and is_stored):
                missing[name] = value
        return missing

    def end(self, status: EndStatus, ended_at_ms: int | None = None) -> None:
        self.client.set_terminated(self.id, status=_STATUS[status], end_time=ended_at_ms)
        if status == EndStatus.FINISHED:
            self._write_record(described=True, complete=True)

    def _log_params(self) -> None:
        """Log the params that are not stored yet: MLflow does not allow changes, and a resumed run may have other
        settings. The uploaded config file is the newest."""
        from mlflow.entities import Param

        values = {**flat_parameters(self._run), **self._run.facts}
        stored = self.client.get_run(self.id).data.params
        params = [Param(name, redact(str(value))) for name, value in values.items() if name not in stored]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self.client.log_batch(self.id, params=params[start : start + PARAMS_AT_ONCE])

    def log_report(self) -> None:
        """Upload the report, if the run has one."""
        if self._directory.report.is_file():
            self.client.log_artifact(self.id, str(self._directory.report))

    def _read_record(self) -> dict[str, Any]:
        record = read_json(self._directory.mlflow)
        return record if isinstance(record, dict) else {}

    def _write_record(self, described: bool, complete: bool = False) -> None:
        recorded = self._read_record().get("tracking_uri")
        if self._is_home or recorded is None or without_login(str(recorded)) == self._uri:
            record = {"run_id": self.id, "tracking_uri": self._uri, "described": described, "complete": complete}
            write_json(self._directory.mlflow, record)


def is_complete(run: RunDirectory) -> bool:
    """Whether the MLflow store has received all of a finished run."""
    record = read_json(run.mlflow)
    return isinstance(record, dict) and record.get("complete") is True


def _log_location(configured: str | None, uri: str) -> None:
    """Log the URI that opens the store, which may differ from the configured one."""
    shown = redact(uri)
    fields = {"tracking_uri": shown}
    in_environment = os.environ.get("MLFLOW_TRACKING_URI")
    is_from_config = configured is not None and HIDDEN_LOGIN not in configured
    if is_from_config and in_environment and in_environment != configured:
        unused = redact(in_environment)
        warn("TRAIN", f"MLFLOW_TRACKING_URI ({unused}) is not used: tracking.mlflow.tracking_uri takes precedence")
    if is_login_missing(configured):
        warn(
            "TRAIN",
            f"the login of the MLflow server {shown} is not stored with the run: set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI",
        )
    if local_directory(uri) is None:
        log("TRAIN", f"MLflow server {shown}", fields=fields)
        return
    given = configured or os.environ.get("MLFLOW_TRACKING_URI") or uri
    why = ""
    if uri.startswith("sqlite:") and not given.startswith("sqlite:"):
        why = f" (MLflow uses the directory {given} as a store only with {ALLOW}=true)"
    log("TRAIN", f"MLflow store {shown}{why}", fields=fields)


def _client(uri: str) -> Any:
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)  # at INFO they log every table they create
    return MlflowClient(tracking_uri=uri)


def as_metrics(step: int, metrics: Metrics, time_ms: int) -> list["Metric"]:
    from mlflow.entities import Metric

    return [Metric(name, value, time_ms, step) for name, value in metrics.items()]


def check_installed() -> None:
    require_mlflow("tracking.mlflow.enabled is true", ", or set tracking.mlflow.enabled to false")


def require_mlflow(what: str, otherwise: str = "") -> None:
    if importlib.util.find_spec("mlflow") is None:
        raise UsageError(f"{what}, but mlflow is not installed.", remedy=f"{install_command('mlflow')}{otherwise}.")


def tracking_location(section: MlflowSection, root_dir: str) -> tuple[str, str | None]:
    """The store of a run in output.root_dir. The config overrides the environment, except for a URI from the record of
    a run, whose login is hidden."""
    uri = section.tracking_uri
    if uri is None or HIDDEN_LOGIN in uri:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or uri
    return store_at(without_login(uri) if uri else sqlite_in(Path(root_dir)))


def without_login(uri: str) -> str:
    """The URI from the record of a run without its hidden login, which then comes from the environment."""
    return uri.replace(HIDDEN_LOGIN, "")


def is_login_missing(uri: str | None) -> bool:
    """Whether a URI from the record of a run had a login that is not available any more. MLflow reads these variables
    for servers, not for databases."""
    if uri is None or HIDDEN_LOGIN not in uri or os.environ.get("MLFLOW_TRACKING_URI"):
        return False
    has_login = bool(os.environ.get("MLFLOW_TRACKING_USERNAME") and os.environ.get("MLFLOW_TRACKING_PASSWORD"))
    is_server = uri.startswith(("http://", "https://"))
    return not (is_server and (has_login or os.environ.get("MLFLOW_TRACKING_TOKEN")))


def store_at(uri: str) -> tuple[str, str | None]:
    """(tracking URI, artifact location or None for the store's default).

    A directory is used as a store if this version of MLflow supports it; otherwise a sqlite file in it, with artifacts
    beside it.
    """
    directory = local_directory(uri)
    if directory is None:
        return uri, None
    if uri.startswith("sqlite:"):
        return uri, (directory / "mlartifacts").as_uri()
    if opens_directories():
        return directory.as_uri(), None
    return store_at(sqlite_in(directory))


def sqlite_in(directory: Path) -> str:
    path = str(directory.expanduser().absolute() / "mlflow.db")
    return "sqlite:///" + path.replace("%", "%25").replace("?", "%3F")  # as SQLAlchemy decodes it


def opens_directories() -> bool:
    """Whether the installed MLflow supports a directory (`./mlruns`) as a store: from 3.13 on only if allowed. Decided
    by its version, because importing MLflow takes seconds."""
    is_allowed = os.environ.get(ALLOW, "").lower() in ("true", "1")  # as MLflow parses it
    return is_allowed or mlflow_version() < (3, 13)


def mlflow_version() -> tuple[int, int]:
    for package in ("mlflow", "mlflow-skinny"):
        with suppress(PackageNotFoundError):
            if match := re.match(r"(\d+)\.(\d+)", version(package)):
                return int(match[1]), int(match[2])
    return 0, 0


def local_directory(uri: str) -> Path | None:
    """The directory of a store on this machine; None for a server."""
    if uri.startswith("databricks") or ("://" in uri and not uri.startswith(("sqlite:", "file:"))):
        return None
    if uri.startswith("sqlite:"):
        path = unquote(uri.removeprefix("sqlite:///").partition("?")[0])
        return Path(path).expanduser().absolute().parent
    if not uri.startswith("file:"):
        return Path(uri).expanduser().absolute()
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(
            f"The MLflow tracking URI '{uri}' has the host '{parts.netloc}', but file: URIs are paths on this machine.",
            remedy=f"Use file://{parts.path or '/...'}, or the http:// URL of a server.",
        )
    return Path(url2pathname(parts.path)).expanduser().absolute()
