"""Summaries and comparisons of runs, from the files of their directories."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmtrain.config.document import read_document
from llmtrain.config.upgrade import upgraded_values
from llmtrain.errors import LlmtrainError
from llmtrain.files import is_there, open_text, read_json
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.generations import read_generations
from llmtrain.runs.heartbeats import read_heartbeats
from llmtrain.runs.lock import is_held
from llmtrain.runs.metrics import read_metrics


def summarize(run: RunDirectory) -> dict[str, Any]:
    """Status, step and losses of a run. `damaged` lists unreadable files; the rest of the summary is still filled."""
    damaged: list[str] = []
    rows = _metrics(run, damaged)
    result = _dictionary(run.finished, damaged)
    losses = _numbers(rows, "train/loss", damaged)
    val_losses = _numbers(rows, "val/loss", damaged)
    meta, values = _dictionary(run.meta, damaged), upgraded_values(config_values(run))
    return {
        "run_id": run.run_id,
        "name": meta.get("name"),
        "status": _status(run, damaged),
        "step": max((row["step"] for row in rows), default=0),
        "max_steps": _max_steps(run, damaged),
        "train_loss": losses[-1] if losses else None,
        "val_loss": val_losses[-1] if val_losses else None,
        "best_val_loss": min(val_losses, default=None),
        "state_sha256": result.get("state_sha256"),
        "started_at": meta.get("started_at"),
        "dataset": _dataset(values),
        "model": _section(values, "model").get("name"),
        "lr": _section(values, "trainer").get("lr"),
        "parameters": _count(result.get("parameters")),
        "path": str(run.path),
        "damaged": sorted(set(damaged)),
    }


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and abs(value) < 1e300 else None


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def _dataset(values: dict[str, Any]) -> str | None:
    """What the run is trained on: its dataset or first file, else the kind of data."""
    data = _section(values, "data")
    files = data.get("files") if isinstance(data.get("files"), list) else None
    named = data.get("dataset_name") or data.get("train_file") or (files[0] if files else None)
    return str(named or data.get("name")) if data else None


def summarize_all(runs: Iterable[RunDirectory]) -> list[dict[str, Any]]:
    """The summaries of the runs that still exist afterwards."""
    rows = [(run, summarize(run)) for run in runs]
    return [row for run, row in rows if run.exists()]


def _dictionary(path: Path, damaged: list[str]) -> dict[str, Any]:
    """A JSON object; empty if there is none."""
    value = read_json(path)
    if isinstance(value, dict):
        return value
    if is_there(path):
        damaged.append(path.name)
    return {}


def _metrics(run: RunDirectory, damaged: list[str]) -> list[dict[str, Any]]:
    try:
        return list(read_metrics(run.metrics))
    except OSError:
        damaged.append(run.metrics.name)
        return []


def _numbers(rows: list[dict[str, Any]], name: str, damaged: list[str]) -> list[float]:
    values = [row[name] for row in rows if row.get(name) is not None]
    numbers = [value for value in values if isinstance(value, float) or (isinstance(value, int) and abs(value) < 1e300)]
    if len(numbers) < len(values):
        damaged.append("metrics.jsonl")
    return numbers


def _max_steps(run: RunDirectory, damaged: list[str]) -> int | None:
    """The last step of the newest start; the config of a run by epochs has none."""
    starts = [row["to_step"] for row in read_generations(run) if isinstance(row.get("to_step"), int)]
    values = config_values(run)
    trainer = values.get("trainer", {})
    if (is_there(run.config) and not values) or not isinstance(trainer, dict):
        damaged.append(run.config.name)
        trainer = {}
    max_steps: int | None = starts[-1] if starts else trainer.get("max_steps")
    return max_steps


def describe(run: RunDirectory) -> dict[str, Any]:
    return {
        **summarize(run),
        "last_written": _local_time(last_written(run)),
        "checkpoints": checkpoint_names(run),
        "latest": pointed_checkpoint(run, "latest"),
        "best": pointed_checkpoint(run, "best"),
        "ranks": [beat for _, beat in sorted(read_heartbeats(run.heartbeats).items())],
        "generations": read_generations(run),
        "result": read_json(run.finished),
        "meta": read_json(run.meta),
        "config": config_values(run),
    }


def config_values(run: RunDirectory) -> dict[str, Any]:
    """config.yaml; empty if it is missing or damaged."""
    try:
        return read_document(run.config).values if run.config.is_file() else {}
    except (LlmtrainError, OSError):
        return {}


def read_meta(run: RunDirectory) -> dict[str, Any]:
    """meta.json; empty if it is missing or damaged."""
    values = read_json(run.meta)
    return values if isinstance(values, dict) else {}


def _status(run: RunDirectory, damaged: list[str]) -> str:
    if _dictionary(run.lock, damaged) and is_held(run.lock):
        return "running"
    return "finished" if run.finished.exists() else "stopped"


def checkpoint_names(run: RunDirectory) -> list[str]:
    steps = (path.name.removeprefix("step_") for path in run.checkpoints.glob("step_*"))
    return [f"step_{step}" for step in sorted(int(step) for step in steps if step.isdecimal())]


def pointed_checkpoint(run: RunDirectory, name: str) -> str | None:
    try:
        with open_text(run.checkpoints / name) as file:
            return file.read().strip()
    except (OSError, ValueError):
        return None


def last_written(run: RunDirectory) -> float | None:
    """When the run last wrote metrics."""
    try:
        return (run.metrics if run.metrics.exists() else run.path).stat().st_mtime
    except OSError:
        return None


def _local_time(at: float | None) -> str | None:
    return None if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
