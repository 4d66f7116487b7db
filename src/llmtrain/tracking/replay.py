"""A run directory that reached no tracking server while it trained, put into an MLflow store afterwards.

It is written the way the live tracker writes, through the same MlflowRun. Doing it again adds what is new.
"""

import os
from pathlib import Path
from typing import Any

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.files import read_json
from llmtrain.redact import HIDDEN_LOGIN, redact, redacted_line
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.generations import read_generations
from llmtrain.runs.lock import is_held
from llmtrain.tracking.base import Status
from llmtrain.tracking.mlflow import (
    MlflowRun,
    is_login_missing,
    local_folder,
    read_rows,
    require_mlflow,
    sqlite_in,
    store_at,
    without_login,
)

_FACTS = ("parameters", "trainable_parameters", "device", "world_size")


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
        text = redacted_line(problem, 300)
        raise UsageError(
            f"Run '{run.run_id}' could not be put into the MLflow store {redact(uri)}: {text}",
            remedy="Check that the store can be reached from this machine, or name another. What has arrived stays, "
            "and the same command goes on.",
        ) from None


def _replay(run: RunDirectory, config: Config, uri: str) -> dict[str, Any]:
    location = store_at(uri)
    rows = read_rows(run)
    times = [at for _, _, at in rows]
    made = MlflowRun(run, config, _facts(run), location, is_home=False)
    is_new = not (made.reopen() or made.find())
    if is_new:
        made.create(started_at_ms=min(times, default=None))
    else:
        made.describe()
        made.read_history()
    added = made.add(rows)
    artifacts = _upload(made, run)
    status = _status(run)
    if status is not None:
        made.end(status, ended_at_ms=max(times, default=None))
    return {
        "run_id": run.run_id,
        "tracking_uri": redact(location[0]),
        "experiment": config.tracking.mlflow.experiment,
        "mlflow_run_id": made.id,
        "is_new": is_new,
        "status": status or "running",
        "metrics": added,
        "metrics_there": sum(len(values) for _, values, _ in rows) - added,
        "artifacts": artifacts,
    }


def _store_from_here(config: Config, run: RunDirectory) -> str:
    """As tracking_location, but the paths in the config are those of the machine that trained: a local store counts
    only where its directory is here, too. A login was taken out of the config before it was written down."""
    named = config.tracking.mlflow.tracking_uri
    if named and HIDDEN_LOGIN in named and not os.environ.get("MLFLOW_TRACKING_URI") and not is_login_missing(named):
        return without_login(named)
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
