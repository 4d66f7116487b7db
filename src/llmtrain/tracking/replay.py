"""A run directory that reached no tracking server while it trained, put into an MLflow store afterwards.

It is written the way the live tracker writes, through the same MlflowRun. Doing it again adds what is new.
"""

import math
import os
from pathlib import Path
from typing import Any

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.runs.atomic import read_json
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.generations import read_generations
from llmtrain.runs.lock import is_held
from llmtrain.runs.metrics import Row, read_metrics
from llmtrain.runs.redact import redact
from llmtrain.tracking.base import Metrics, Status
from llmtrain.tracking.mlflow import MlflowRun, as_metrics, local_folder, require_mlflow, sqlite_in, store_at

_FACTS = ("parameters", "trainable_parameters", "device", "world_size")
_NO_METRIC = ("step", "time")


def replay_run(run: RunDirectory, uri: str | None = None) -> dict[str, Any]:
    """Put a run into the MLflow store at `uri`; None: the store that its config or the environment names, seen from
    this machine, else a sqlite file beside the run directory."""
    require_mlflow("A run is to be put into MLflow")
    if not run.config.is_file():
        raise UsageError(
            f"Run '{run.run_id}' has no {run.config.name}, so its parameters are not known.",
            remedy="It is written unless output.save_config_copy is false; fetch the whole run directory.",
        )
    config = load_config(run.config)
    uri = uri or _store_from_here(config, run)
    try:
        return _replay(run, config, uri)
    except LlmtrainError:
        raise
    except Exception as problem:  # whatever a server, a database or MLflow itself has to say
        text = redact(" ".join(str(problem).split()))[:300]
        raise UsageError(
            f"Run '{run.run_id}' could not be put into the MLflow store {redact(uri)}: {text}",
            remedy="Check that the store can be reached from this machine, or name another. What has arrived stays, "
            "and the same command goes on.",
        ) from None


def _replay(run: RunDirectory, config: Config, uri: str) -> dict[str, Any]:
    location = store_at(uri)
    rows = list(read_metrics(run.metrics))
    times = [_time_ms(row, run) for row in rows]
    made = MlflowRun(run, config, _facts(run), location, is_home=False)
    is_new = not (made.reopen() or made.find())
    if is_new:
        made.create(started_at_ms=min(times, default=None))
    else:
        made.describe()
    known = _known(made, rows)
    metrics = [
        metric
        for row, time_ms in zip(rows, times, strict=True)
        for metric in as_metrics(row["step"], _metrics(row), time_ms)
        if _same(metric.key, metric.step, metric.value) not in known
    ]
    made.log_metrics(metrics)
    artifacts = _upload(made, run)
    status = _status(run)
    if status is not None:
        made.end(status, ended_at_ms=max(times, default=None))
    return {
        "run_id": run.run_id,
        "tracking_uri": redact(location[0]),
        "experiment": config.mlflow.experiment,
        "mlflow_run_id": made.id,
        "is_new": is_new,
        "status": status or "running",
        "metrics": len(metrics),
        "metrics_there": sum(len(_metrics(row)) for row in rows) - len(metrics),
        "artifacts": artifacts,
    }


def _store_from_here(config: Config, run: RunDirectory) -> str:
    """As tracking_location, but the paths in the config are those of the machine that trained: a local store counts
    only where its directory is here, too. A login was taken out of the config before it was written down."""
    named = config.mlflow.tracking_uri
    if named and redact(named) == named and "***" not in named:
        folder = local_folder(named)
        if folder is None or folder.is_dir():
            return named
    from_environment = os.environ.get("MLFLOW_TRACKING_URI")
    if named and "***" in named and not from_environment:
        raise UsageError(
            f"The config of run '{run.run_id}' names the store {named}, without its login.",
            remedy="Give the URI of the store, or set MLFLOW_TRACKING_URI (and MLFLOW_TRACKING_USERNAME, "
            "MLFLOW_TRACKING_PASSWORD).",
        )
    return from_environment or sqlite_in(run.path.parent)


def _facts(run: RunDirectory) -> dict[str, Any]:
    """What the live tracker knows besides the config, as far as it is written down."""
    starts = read_generations(run)
    result = read_json(run.finished)
    last = starts[-1] if starts else {}
    found = {"world_size": last.get("world_size"), "steps": last.get("to_step")}
    if isinstance(result, dict):
        found |= {name: result.get(name) for name in _FACTS}
    return {name: value for name, value in found.items() if value is not None}


def _metrics(row: Row) -> Metrics:
    """The numbers of a row; null stands for one that was not finite."""
    values = {name: math.nan if value is None else value for name, value in row.items() if name not in _NO_METRIC}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _time_ms(row: Row, run: RunDirectory) -> int:
    seconds = row.get("time")
    return round((seconds if isinstance(seconds, int | float) else run.metrics.stat().st_mtime) * 1000)


def _known(made: MlflowRun, rows: list[Row]) -> set[tuple[str, int, str]]:
    """What the store has. Not told apart by time: the live tracker's clock stood a little later than the row's."""
    there = made.client.get_run(made.id).data.metrics.keys() & {name for row in rows for name in _metrics(row)}
    histories = (made.client.get_metric_history(made.id, name) for name in sorted(there))
    return {_same(metric.key, metric.step, metric.value) for history in histories for metric in history}


def _same(name: str, step: int, value: float) -> tuple[str, int, str]:
    return name, step, repr(float(value))  # as text: nan is not equal to itself


def _upload(made: MlflowRun, run: RunDirectory) -> list[str]:
    """Files for people (config and metadata went with the description); checkpoints stay where they are."""
    for folder in (run.samples, run.logs, run.adapter):
        if folder.is_dir():
            made.client.log_artifacts(made.id, str(folder), artifact_path=folder.name)
    if run.finished.is_file():
        made.client.log_artifact(made.id, str(run.finished))
    return sorted(Path(item.path).name for item in made.client.list_artifacts(made.id))


def _status(run: RunDirectory) -> Status | None:
    """How the run ended; None while it is going on. A start that ended without a word has crashed."""
    if run.finished.is_file():
        return "finished"
    if is_held(run.lock):
        return None
    starts = read_generations(run)
    return "stopped" if starts and starts[-1].get("ended") == "stopped" else "failed"
