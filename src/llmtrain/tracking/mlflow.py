"""MLflow (extra `mlflow`), in a thread of its own: a slow or dead server costs training nothing.

The id of the MLflow run is kept in the run directory, so that a resumed run goes on in the same one. There it first
adds the rows of metrics.jsonl that the server did not get before the interruption, and then leaves out the steps that
it has already: the steps after the newest checkpoint are trained twice. A finished run whose process was killed before
everything was sent is completed by the next start, which has nothing else to do.
"""

import importlib.util
import logging
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from llmtrain.config.schema import Config
from llmtrain.errors import UsageError
from llmtrain.files import read_json, write_json
from llmtrain.logs import log, warn
from llmtrain.redact import HIDDEN_LOGIN, redact, redact_values, redacted_line
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.metrics import Row, read_metrics
from llmtrain.tracking.base import Metrics, NullTracker, Status, TrackedRun

if TYPE_CHECKING:
    from mlflow.entities import Metric

ALLOW = "MLFLOW_ALLOW_FILE_STORE"  # MLflow's own variable: a directory as a store
RUN_ID_TAG = "llmtrain.run_id"
_LOSSES = ("train/loss", "val/loss")
_NO_METRIC = ("step", "time")
METRICS_AT_ONCE, PARAMS_AT_ONCE = 1000, 100  # what a server takes in one call
FLUSH_SEC = 30.0
FLUSH_WHEN_STOPPED_SEC = 5.0  # a pod that is told to stop has little time left
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
# MLflow's own defaults try a dead server for minutes, and send usage figures to its makers.
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # standard output is for results
    "GIT_PYTHON_REFRESH": "quiet",
}


class MlflowTracker(NullTracker):
    def __init__(self, run: TrackedRun) -> None:
        check_installed()
        self._run = run
        self._location = tracking_location(run.config)
        _say_where(run.config, self._location[0])
        self._made: MlflowRun
        # Read here, before the training thread appends to it; the JSONL tracker has dropped what will be redone.
        self._earlier = read_rows(run.directory) if run.resumed_from else []
        self._dead = False
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._jobs.put(self._open)
        self._thread.start()

    def log(self, step: int, metrics: Metrics) -> None:
        now = int(time.time() * 1000)
        self._jobs.put(lambda: self._made.add([(step, metrics, now)]))

    def samples(self, step: int, path: Path) -> None:  # noqa: ARG002
        self._jobs.put(lambda: self._made.client.log_artifact(self._made.id, str(path), artifact_path="samples"))

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
                text = redacted_line(problem, 200)
                warn("TRAIN", f"MLflow is lost; training goes on and metrics.jsonl keeps everything: {text}")

    def _open(self) -> None:
        run = self._run
        self._made = MlflowRun(run.directory, run.config, run.facts, self._location)
        if self._made.reopen():
            self._made.read_history()
        else:
            self._made.create()
        self._made.add(self._earlier)

    def _close(self, status: Status, result: dict[str, Any] | None) -> None:
        best = (result or {}).get("best_checkpoint")
        if best and self._run.config.tracking.mlflow.log_models:
            self._made.client.log_artifacts(self._made.id, best, artifact_path="best_checkpoint")
        if status != "superseded":  # then the run goes on, in another process
            self._made.end(status)


class MlflowRun:
    """The run of an MLflow store that stands for a run directory. The live tracker and the replay of a finished run
    both write through it, so that a store cannot tell the two apart."""

    def __init__(
        self,
        directory: RunDirectory,
        config: Config,
        facts: dict[str, Any],
        location: tuple[str, str | None],
        is_home: bool = True,
    ) -> None:
        """`is_home`: the run directory notes this store as its own, and a resumed run goes on in it."""
        uri, self._artifacts = location
        self._directory, self._config, self._facts = directory, config, facts
        self._uri, self._is_home = without_login(redact(uri)), is_home
        folder = local_folder(uri)
        if folder is not None and uri.startswith("sqlite:"):
            folder.mkdir(parents=True, exist_ok=True)
        self.client = _client(uri)
        self.id = ""
        self._there: dict[tuple[str, int], set[str]] = {}  # (metric, step) -> its values, as text: nan != nan

    def reopen(self) -> bool:
        """Go on in the MLflow run that an earlier start made, unless it was made in another store."""
        known = self._note()
        if without_login(str(known.get("tracking_uri"))) != self._uri or not self.take(str(known.get("run_id"))):
            return False
        if not known.get("described"):  # killed while it was being described
            self.describe()
        else:
            self._write_note(described=True)  # there is more to come
        return True

    def find(self) -> bool:
        """Go on in a run that carries our run id in the experiment, whoever made it."""
        experiment = self.client.get_experiment_by_name(self._config.tracking.mlflow.experiment)
        if experiment is None:
            return False
        wanted = f"tags.`{RUN_ID_TAG}` = '{self._directory.run_id}'"
        found = self.client.search_runs([experiment.experiment_id], wanted, max_results=1)
        return bool(found) and self.take(found[0].info.run_id)

    def take(self, mlflow_id: str) -> bool:
        try:
            self.client.update_run(mlflow_id, status="RUNNING")
        except Exception:  # deleted there, or the server is gone: making a new one will tell
            return False
        self.id = mlflow_id
        return True

    def create(self, started_at_ms: int | None = None) -> None:
        config, run_id = self._config.tracking.mlflow, self._directory.run_id
        found = self.client.get_experiment_by_name(config.experiment)
        experiment = (
            found.experiment_id
            if found
            else self.client.create_experiment(config.experiment, artifact_location=self._artifacts)
        )
        made = self.client.create_run(
            experiment, start_time=started_at_ms, run_name=redact(config.run_name or run_id), tags={RUN_ID_TAG: run_id}
        )
        self.id = made.info.run_id
        self.describe()

    def describe(self) -> None:
        """Parameters, config and metadata; the note in the run directory says whether all of it arrived."""
        self._write_note(described=False)
        self._log_params()
        for path in (self._directory.config, self._directory.meta):
            if path.is_file():
                self.client.log_artifact(self.id, str(path))
        self._write_note(described=True)

    def read_history(self) -> None:
        """Look up which steps the store has."""
        for name in self.client.get_run(self.id).data.metrics:
            for metric in self.client.get_metric_history(self.id, name):
                self._there.setdefault((metric.key, metric.step), set()).add(repr(float(metric.value)))

    def add(self, rows: Sequence["TrackedRow"]) -> int:
        """Log what the store does not have yet, and say how many values that was."""
        metrics = [metric for step, values, at in rows for metric in as_metrics(step, self._missing(step, values), at)]
        for start in range(0, len(metrics), METRICS_AT_ONCE):
            self.client.log_batch(self.id, metrics=metrics[start : start + METRICS_AT_ONCE])
        return len(metrics)

    def _missing(self, step: int, values: Metrics) -> Metrics:
        """A step whose losses are there with the same values was logged before it was trained again: its throughput
        is another, and would be a second point at the same step. Other losses are news, whatever is there."""

        def has(name: str) -> bool:
            return repr(float(values[name])) in self._there.get((name, step), ())

        is_same = all(has(name) for name in _LOSSES if name in values)
        return {n: v for n, v in values.items() if not has(n) and not (is_same and (n, step) in self._there)}

    def end(self, status: Status, ended_at_ms: int | None = None) -> None:
        self.client.set_terminated(self.id, status=_STATUS[status], end_time=ended_at_ms)
        if status == "finished":
            self._write_note(described=True, complete=True)

    def _log_params(self) -> None:
        """Those that are not there yet: MLflow refuses to change one, and a resumed run may have other settings. The
        config that goes beside them is the newest."""
        from mlflow.entities import Param

        values = {
            f"{s}.{f}": v
            for s, fields in redact_values(self._config.as_dict()).items()
            if isinstance(fields, dict)
            for f, v in fields.items()
        }
        known = self.client.get_run(self.id).data.params
        params = [Param(k, redact(str(v))) for k, v in {**values, **self._facts}.items() if k not in known]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self.client.log_batch(self.id, params=params[start : start + PARAMS_AT_ONCE])

    def _note(self) -> dict[str, Any]:
        known = read_json(self._directory.mlflow)
        return known if isinstance(known, dict) else {}

    def _write_note(self, described: bool, complete: bool = False) -> None:
        there = self._note().get("tracking_uri")
        if self._is_home or there is None or without_login(str(there)) == self._uri:
            note = {"run_id": self.id, "tracking_uri": self._uri, "described": described, "complete": complete}
            write_json(self._directory.mlflow, note)


def is_complete(run: RunDirectory) -> bool:
    """Whether the MLflow store of a finished run has all of it."""
    note = read_json(run.mlflow)
    return isinstance(note, dict) and note.get("complete") is True


def _say_where(config: Config, uri: str) -> None:
    """What opens the store: not always what was named."""
    shown, fields = redact(uri), {"tracking_uri": redact(uri)}
    if is_login_missing(config.tracking.mlflow.tracking_uri):
        warn(
            "TRAIN",
            f"the login of the MLflow server {shown} is not kept with the run: set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI",
        )
    if local_folder(uri) is None:
        log("TRAIN", f"MLflow server {shown}", fields=fields)
        return
    named = config.tracking.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or uri
    why = "" if named.startswith("sqlite:") else f" (MLflow opens the directory {named} itself only with {ALLOW}=true)"
    log("TRAIN", f"MLflow store {shown}{why if uri.startswith('sqlite:') else ''}", fields=fields)


def _client(uri: str) -> Any:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)  # they tell of every table they make
    return MlflowClient(tracking_uri=uri)


TrackedRow = tuple[int, Metrics, int]
"""Step, metrics, and when: milliseconds since 1970."""


def read_rows(run: RunDirectory) -> list[TrackedRow]:
    """metrics.jsonl, as trackers get it; null stands for a number that was not finite."""
    return [(row["step"], _metrics(row), _time_ms(row, run)) for row in read_metrics(run.metrics)]


def _metrics(row: Row) -> Metrics:
    values = {name: math.nan if value is None else value for name, value in row.items() if name not in _NO_METRIC}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _time_ms(row: Row, run: RunDirectory) -> int:
    seconds = row.get("time")
    return round((seconds if isinstance(seconds, int | float) else run.metrics.stat().st_mtime) * 1000)


def as_metrics(step: int, metrics: Metrics, time_ms: int) -> list["Metric"]:
    from mlflow.entities import Metric

    return [Metric(name, value, time_ms, step) for name, value in metrics.items()]


def check_installed() -> None:
    require_mlflow("tracking.mlflow.enabled is true", ", or set tracking.mlflow.enabled to false")


def require_mlflow(what: str, otherwise: str = "") -> None:
    if importlib.util.find_spec("mlflow") is None:
        raise UsageError(f"{what}, but mlflow is not installed.", remedy=f"pip install 'llmtrain[mlflow]'{otherwise}.")


def tracking_location(config: Config) -> tuple[str, str | None]:
    """Where a run with this config is tracked. The config wins over the environment, but for a URI that was read from
    the record of a run, where its login is hidden."""
    named, from_environment = config.tracking.mlflow.tracking_uri, os.environ.get("MLFLOW_TRACKING_URI")
    if named is None or HIDDEN_LOGIN in named:
        named = from_environment or named
    return store_at(without_login(named) if named else sqlite_in(Path(config.output.root_dir)))


def without_login(uri: str) -> str:
    """A URI from the record of a run, as a server takes it that gets its login from the environment."""
    return uri.replace(HIDDEN_LOGIN, "")


def is_login_missing(uri: str | None) -> bool:
    """Whether a URI from the record of a run had a login that is nowhere now. MLflow itself reads these variables; they
    are for servers, not for databases."""
    if uri is None or HIDDEN_LOGIN not in uri or os.environ.get("MLFLOW_TRACKING_URI"):
        return False
    has_login = bool(os.environ.get("MLFLOW_TRACKING_USERNAME") and os.environ.get("MLFLOW_TRACKING_PASSWORD"))
    is_server = uri.startswith(("http://", "https://"))
    return not (is_server and (has_login or os.environ.get("MLFLOW_TRACKING_TOKEN")))


def store_at(uri: str) -> tuple[str, str | None]:
    """(tracking URI, artifact location or None for the store's own).

    A directory stays one where MLflow opens directories, so that the same value opens it; else it becomes a sqlite file
    in it with artifacts beside.
    """
    folder = local_folder(uri)
    if folder is None:
        return uri, None
    if uri.startswith("sqlite:"):
        return uri, (folder / "mlartifacts").as_uri()
    return (folder.as_uri(), None) if opens_directories() else store_at(sqlite_in(folder))


def sqlite_in(folder: Path) -> str:
    path = str(folder.expanduser().absolute() / "mlflow.db")
    return "sqlite:///" + path.replace("%", "%25").replace("?", "%3F")  # as SQLAlchemy reads it back


def opens_directories() -> bool:
    """Whether the installed MLflow takes a directory (`./mlruns`) for a store: from 3.13 on only when told to. Its
    version says it; importing MLflow takes seconds."""
    is_allowed = os.environ.get(ALLOW, "").lower() in ("true", "1")  # as MLflow reads it
    return is_allowed or mlflow_version() < (3, 13)


def mlflow_version() -> tuple[int, int]:
    for package in ("mlflow", "mlflow-skinny"):
        with suppress(PackageNotFoundError):
            if match := re.match(r"(\d+)\.(\d+)", version(package)):
                return int(match[1]), int(match[2])
    return 0, 0


def local_folder(uri: str) -> Path | None:
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
            f"MLflow's tracking URI '{uri}' names the host '{parts.netloc}', but file: is for paths of this machine.",
            remedy=f"Write file://{parts.path or '/...'}, or the http:// URL of a server.",
        )
    return Path(url2pathname(parts.path)).expanduser().absolute()
