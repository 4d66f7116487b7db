"""Uploads a run directory to an MLflow store after training, as the live tracker would. Repeated, it adds new rows."""

import os
from pathlib import Path
from typing import Any

from llmtrain.config.document import read_document
from llmtrain.config.load import build_config
from llmtrain.core.redact import HIDDEN_LOGIN, redact, redacted_line
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.state import EndStatus, RunState
from llmtrain.runs.view import RunView
from llmtrain.tracking.base import TrackedRun
from llmtrain.tracking.mlflow import (
    MlflowRun,
    is_login_missing,
    local_directory,
    require_mlflow,
    sqlite_in,
    store_at,
    without_login,
)
from llmtrain.tracking.rows import read_rows

_FACTS = ("parameters", "trainable_parameters", "device", "world_size")


def replay_run(run: RunDirectory, uri: str | None = None) -> dict[str, Any]:
    """Upload a run to the MLflow store at `uri`. None: the store of its config or of the environment, if it is
    accessible from this machine, else a sqlite file beside the run directory."""
    require_mlflow("Uploading a run needs MLflow")
    if not run.config.is_file():
        raise UsageError(
            f"Run '{run.run_id}' has no {run.config.name}, so its parameters are unknown.",
            remedy="Fetch the complete run directory. (The file is not written if output.save_config_copy is false.)",
        )
    config = build_config(read_document(run.config), is_recorded=True)
    uri = uri or _store_from_here(config.tracking.mlflow.tracking_uri, run)
    try:
        return _replay(TrackedRun(run, config, resumed_from=0, evaluated_step=0, facts=_facts(RunView(run))), uri)
    except LlmtrainError:
        raise
    except Exception as problem:  # of a server, a database or MLflow itself
        message = redacted_line(problem, 300)
        raise UsageError(
            f"Run '{run.run_id}' could not be uploaded to the MLflow store {redact(uri)}: {message}",
            remedy="Check that the store is accessible from this machine, then repeat the command: it continues where "
            "it stopped.",
        ) from None


def _replay(tracked: TrackedRun, uri: str) -> dict[str, Any]:
    run = tracked.directory
    location = store_at(uri)
    view = RunView(run)
    rows = read_rows(view)
    times = [at for _, _, at in rows]
    mlflow_run = MlflowRun(tracked, location, is_home=False)
    is_new = not (mlflow_run.reopen() or mlflow_run.find())
    if is_new:
        mlflow_run.create(started_at_ms=min(times, default=None))
    else:
        mlflow_run.describe()
        mlflow_run.read_history()
    added = mlflow_run.add(rows)
    artifacts = _upload(mlflow_run, run)
    status = _status(view)
    if status is not None:
        mlflow_run.end(status, ended_at_ms=max(times, default=None))
    return {
        "run_id": run.run_id,
        "tracking_uri": redact(location[0]),
        "experiment": tracked.config.tracking.mlflow.experiment,
        "mlflow_run_id": mlflow_run.id,
        "is_new": is_new,
        "status": status or "running",
        "metrics": added,
        "metrics_there": sum(len(values) for _, values, _ in rows) - added,
        "artifacts": artifacts,
    }


def _store_from_here(uri: str | None, run: RunDirectory) -> str:
    """Like tracking_location, but paths in the config are those of the machine that trained: a local store is used only
    if its directory exists here. The config was stored without a login."""
    if uri and HIDDEN_LOGIN in uri and not os.environ.get("MLFLOW_TRACKING_URI") and not is_login_missing(uri):
        return without_login(uri)
    if uri and redact(uri) == uri and "***" not in uri:
        directory = local_directory(uri)
        if directory is None or directory.is_dir():
            return uri
    from_environment = os.environ.get("MLFLOW_TRACKING_URI")
    if uri and "***" in uri and not from_environment:
        raise UsageError(
            f"The config of run '{run.run_id}' has the store {uri}, without its login.",
            remedy="Pass the URI of the store, or set MLFLOW_TRACKING_URI (and MLFLOW_TRACKING_USERNAME, "
            "MLFLOW_TRACKING_PASSWORD).",
        )
    return from_environment or sqlite_in(run.path.parent)


def _facts(view: RunView) -> dict[str, Any]:
    """The facts of the live tracker that the run directory has."""
    facts = {"world_size": view.last_start.get("world_size"), "steps": view.last_start.get("to_step")}
    if view.result:
        facts |= {name: view.result.get(name) for name in _FACTS}
    return {name: value for name, value in facts.items() if value is not None}


def _upload(mlflow_run: MlflowRun, run: RunDirectory) -> list[str]:
    """Upload samples, logs, adapter, result and report, no checkpoints; `describe` has uploaded config and metadata."""
    client = mlflow_run.client
    for directory in (run.samples, run.logs, run.adapter):
        if directory.is_dir():
            client.log_artifacts(mlflow_run.id, str(directory), artifact_path=directory.name)
    if run.finished.is_file():
        client.log_artifact(mlflow_run.id, str(run.finished))
    mlflow_run.log_report()
    return sorted(Path(item.path).name for item in client.list_artifacts(mlflow_run.id))


def _status(view: RunView) -> EndStatus | None:
    """How the run ended; None while it is running. A start without a recorded end has crashed."""
    if view.is_finished:
        return EndStatus.FINISHED
    if view.state == RunState.RUNNING:
        return None
    return EndStatus.STOPPED if view.state == RunState.INTERRUPTED else EndStatus.FAILED
