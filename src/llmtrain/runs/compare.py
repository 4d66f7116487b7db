"""What differs between runs, and which are best."""

from collections.abc import Sequence
from typing import Any

from llmtrain.config.schema import differences
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.groups import best_group, field_value, group_runs, mixed_fields
from llmtrain.runs.listing import summarize
from llmtrain.runs.metadata import architecture_of
from llmtrain.runs.view import RunView


def compare(runs: Sequence[RunDirectory], group_by: Sequence[str] = ()) -> dict[str, Any]:
    """Config, losses and final states of two runs or more. A difference in config has `values`, in the order of the
    runs; of two runs `first` and `second`. `groups` are the runs with one setting, or with the same values of the
    fields `group_by`, and `best` is one of them."""
    views = [RunView(run) for run in runs]
    rows = [summarize(view) for view in views]
    configs = [view.current_config for view in views]
    losses = [_losses(view) for view in views]
    common = sorted(set.intersection(*(set(each) for each in losses)))
    different = (step for step in common if len({each[step] for each in losses}) > 1)
    hashes = [row["state_sha256"] for row in rows]
    groups = group_runs(rows, configs, group_by)
    objectives = [str(field_value(each, "trainer.objective.name") or "next_token") for each in configs]
    return {
        "runs": rows,
        "config_differences": _config_differences(configs),
        "compared_steps": len(common),
        "first_different_step": next(different, None),
        "same_state": len(set(hashes)) == 1 if all(hashes) else None,
        "group_by": list(group_by),
        "groups": groups,
        "mixed_fields": mixed_fields(configs, group_by) if group_by else [],
        "objectives": objectives,
        "best": best_group(groups) if len(set(objectives)) == 1 else None,
        "architectures": [_recorded(view, "architecture", architecture_of(view.meta)) for view in views],
        "threads": [_recorded(view, "threads") for view in views],
    }


def _losses(view: RunView) -> dict[int, Any]:
    return {row["step"]: row["train/loss"] for row in view.rows if row.get("train/loss") is not None}


def _config_differences(configs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    fields = {path for other in configs[1:] for path, _, _ in differences(configs[0], other)}
    fields.discard("output.run_id")  # differs between any two runs
    rows = []
    for path in sorted(fields):
        found = [field_value(each, path) for each in configs]
        if len(configs) == 2:
            rows.append({"field": path, "first": found[0], "second": found[1]})
        else:
            rows.append({"field": path, "values": found})
    return rows


def _recorded(view: RunView, name: str, default: Any = None) -> list[Any]:
    """The distinct values that the starts of a run recorded, in order; `default` if none did."""
    values = [row[name] for row in view.generations if row.get(name) is not None] or [default]
    return list(dict.fromkeys(value for value in values if isinstance(value, str | int)))
