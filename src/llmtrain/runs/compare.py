"""What differs between runs, and which one is best."""

from collections.abc import Sequence
from typing import Any

from llmtrain.config.schema import differences
from llmtrain.config.upgrade import upgraded_values
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.generations import read_generations
from llmtrain.runs.metadata import architecture_of
from llmtrain.runs.metrics import read_metrics
from llmtrain.runs.summary import config_values, read_meta, summarize


def compare(runs: Sequence[RunDirectory]) -> dict[str, Any]:
    """Config, losses and final states of two runs or more. A difference in config has `values`, in the order of the
    runs; of two runs `first` and `second`."""
    rows = [summarize(run) for run in runs]
    losses = [_losses(run) for run in runs]
    common = sorted(set.intersection(*(set(each) for each in losses)))
    hashes = [row["state_sha256"] for row in rows]
    return {
        "runs": rows,
        "config_differences": _config_differences(runs),
        "compared_steps": len(common),
        "first_different_step": next((step for step in common if len({each[step] for each in losses}) > 1), None),
        "same_state": len(set(hashes)) == 1 if all(hashes) else None,
        "best": _best(rows),
        "architectures": [_recorded(run, "architecture", architecture_of(read_meta(run))) for run in runs],
        "threads": [_recorded(run, "threads") for run in runs],
    }


def _losses(run: RunDirectory) -> dict[int, Any]:
    try:
        rows = list(read_metrics(run.metrics))
    except OSError:
        return {}
    return {row["step"]: row["train/loss"] for row in rows if row.get("train/loss") is not None}


def _config_differences(runs: Sequence[RunDirectory]) -> list[dict[str, Any]]:
    values = [upgraded_values(config_values(run)) for run in runs]
    fields = {path for other in values[1:] for path, _, _ in differences(values[0], other)} - {"output.run_id"}
    rows = []
    for path in sorted(fields):
        found = [_value(each, path) for each in values]
        values_of = {"first": found[0], "second": found[1]} if len(runs) == 2 else {"values": found}
        rows.append({"field": path, **values_of})
    return rows


def _value(values: dict[str, Any], path: str) -> Any:
    section, _, field = path.partition(".")
    fields = values.get(section)
    if not field:
        return fields
    return fields.get(field) if isinstance(fields, dict) else None


def _best(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The run with the lowest validation loss, and by how much it is lower than that of the next one."""
    evaluated = sorted((row["best_val_loss"], row["run_id"]) for row in rows if row["best_val_loss"] is not None)
    if len(evaluated) < 2:
        return None
    (best, run_id), (second, _) = evaluated[:2]
    return {"run_id": run_id, "best_val_loss": best, "margin": second - best}


def _recorded(run: RunDirectory, name: str, default: Any = None) -> list[Any]:
    """The distinct values that the starts of a run recorded, in order; `default` if none did."""
    values = [row[name] for row in read_generations(run) if row.get(name) is not None] or [default]
    return list(dict.fromkeys(value for value in values if isinstance(value, str | int)))
