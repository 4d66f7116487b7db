"""The scores of a run on tasks: tasks/step_N.json, written at evaluations and by `llmtrain eval --tasks`."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtrain.core.files import read_json, write_json
from llmtrain.runs.directory import RunDirectory

Scores = dict[str, dict[str, Any]]
"""Task -> version, few_shot, items, sha256, metrics, ... (training/tasks/score.py)"""
_FILE = re.compile(r"step_(\d{1,18})\.json")


def write_task_scores(run: RunDirectory, step: int, scores: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the scores of a checkpoint; those of other tasks at the same step stay."""
    run.task_scores.mkdir(exist_ok=True)
    write_json(_path(run, step), {**_read(run, step), **{name: dict(score) for name, score in scores.items()}})


def scored_steps(run: RunDirectory) -> list[int]:
    """Steps with scores, oldest first."""
    try:
        names = [path.name for path in run.task_scores.iterdir()]
    except OSError:
        return []
    return sorted(int(match[1]) for name in names if (match := _FILE.fullmatch(name)))


def score_files(run: RunDirectory) -> list[Path]:
    """The files with scores, oldest step first."""
    return [_path(run, step) for step in scored_steps(run)]


def task_scores_at(run: RunDirectory, step: int) -> Scores:
    return _read(run, step)


def newest_task_scores(run: RunDirectory) -> dict[str, float]:
    """`NAME/METRIC` -> its newest value."""
    found: dict[str, float] = {}
    for step in scored_steps(run):
        for task, score in _read(run, step).items():
            for metric, value in score["metrics"].items():
                found[f"{task}/{metric}"] = value
    return found


def _path(run: RunDirectory, step: int) -> Path:
    return run.task_scores / f"step_{step}.json"


def _read(run: RunDirectory, step: int) -> Scores:
    """What can be read: a damaged file has no scores."""
    values = read_json(_path(run, step))
    found: Scores = {}
    for name, score in (values if isinstance(values, dict) else {}).items():
        metrics = score.get("metrics") if isinstance(score, dict) else None
        if isinstance(metrics, dict) and all(isinstance(value, int | float) for value in metrics.values()):
            found[name] = score
    return found
