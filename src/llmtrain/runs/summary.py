"""Summaries and comparisons of runs, from the files of their directories."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmtrain.config.document import read_document
from llmtrain.config.schema import differences
from llmtrain.config.upgrade import upgraded_values
from llmtrain.errors import LlmtrainError
from llmtrain.files import is_there, open_text, read_json
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.generations import read_generations
from llmtrain.runs.heartbeats import read_heartbeats
from llmtrain.runs.lock import is_held
from llmtrain.runs.metadata import architecture_of
from llmtrain.runs.metrics import read_metrics


def summarize(run: RunDirectory) -> dict[str, Any]:
    """Status, step and losses of a run. `damaged` lists unreadable files; the rest of the summary is still filled."""
    damaged: list[str] = []
    rows = _metrics(run, damaged)
    result = _dictionary(run.finished, damaged)
    losses = _numbers(rows, "train/loss", damaged)
    val_losses = _numbers(rows, "val/loss", damaged)
    return {
        "run_id": run.run_id,
        "name": _dictionary(run.meta, damaged).get("name"),
        "status": _status(run, damaged),
        "step": max((row["step"] for row in rows), default=0),
        "max_steps": _max_steps(run, damaged),
        "train_loss": losses[-1] if losses else None,
        "val_loss": val_losses[-1] if val_losses else None,
        "best_val_loss": min(val_losses, default=None),
        "state_sha256": result.get("state_sha256"),
        "path": str(run.path),
        "damaged": sorted(set(damaged)),
    }


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
    numbers = [value for value in values if isinstance(value, int | float)]
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
        "last_written": _last_written(run),
        "checkpoints": _checkpoints(run),
        "latest": _pointer(run, "latest"),
        "best": _pointer(run, "best"),
        "ranks": [beat for _, beat in sorted(read_heartbeats(run.heartbeats).items())],
        "generations": read_generations(run),
        "result": read_json(run.finished),
        "meta": read_json(run.meta),
        "config": config_values(run),
    }


def compare(first: RunDirectory, second: RunDirectory) -> dict[str, Any]:
    rows = [summarize(first), summarize(second)]
    changes = differences(*(upgraded_values(config_values(run)) for run in (first, second)))
    losses = [
        {row["step"]: row["train/loss"] for row in _metrics(run, []) if row.get("train/loss") is not None}
        for run in (first, second)
    ]
    common = sorted(losses[0].keys() & losses[1].keys())
    hashes = [row["state_sha256"] for row in rows]
    return {
        "runs": rows,
        "config_differences": [
            {"field": path, "first": old, "second": new} for path, old, new in changes if path != "output.run_id"
        ],
        "compared_steps": len(common),
        "first_different_step": next((step for step in common if losses[0][step] != losses[1][step]), None),
        "same_state": hashes[0] == hashes[1] if all(hashes) else None,
        "architectures": [_recorded(run, "architecture", architecture_of(read_meta(run))) for run in (first, second)],
        "threads": [_recorded(run, "threads") for run in (first, second)],
    }


def _recorded(run: RunDirectory, name: str, default: Any = None) -> list[Any]:
    """The distinct values that the starts of a run recorded, in order; `default` if none did."""
    values = [row[name] for row in read_generations(run) if row.get(name) is not None] or [default]
    return list(dict.fromkeys(value for value in values if isinstance(value, str | int)))


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


def _checkpoints(run: RunDirectory) -> list[str]:
    steps = (path.name.removeprefix("step_") for path in run.checkpoints.glob("step_*"))
    return [f"step_{step}" for step in sorted(int(step) for step in steps if step.isdecimal())]


def _pointer(run: RunDirectory, name: str) -> str | None:
    try:
        with open_text(run.checkpoints / name) as file:
            return file.read().strip()
    except (OSError, ValueError):
        return None


def _last_written(run: RunDirectory) -> str | None:
    try:
        at = (run.metrics if run.metrics.exists() else run.path).stat().st_mtime
    except OSError:
        return None
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
