"""The text that `llmtrain runs` prints."""

import json
import time
from typing import Any

from llmtrain.config.schema import changed_fields
from llmtrain.runs.listing import age_of
from llmtrain.runs.prune import Pruned
from llmtrain.terminal import format_columns
from llmtrain.text import format_bytes, plural

Row = dict[str, Any]
HASH_SHOWN = 16


def run_table(rows: list[Row]) -> str:
    head = ["run_id", "status", "step", "train_loss", "val_loss", "best", "lr", "parameters", "dataset", "age"]
    has_damage = any(row["damaged"] for row in rows)
    lines = [[*head, *(["damaged"] if has_damage else [])]]
    for row in rows:
        cells = [
            row["run_id"],
            row["status"],
            f"{row['step']}/{_plain(row['max_steps'])}",
            *(_loss(row[name]) for name in ("train_loss", "val_loss", "best_val_loss")),
            _plain(row["lr"]),
            _count(row["parameters"]),
            _plain(row["dataset"]),
            _plain(age_of(row)),
        ]
        lines.append([*cells, *([", ".join(row["damaged"]) or "-"] if has_damage else [])])
    return format_columns(lines)


def comparison_lines(value: dict[str, Any]) -> list[str]:
    rows, changes = value["runs"], value["config_differences"]
    head = ["run_id", "status", "step", "train_loss", "val_loss", "best_val_loss", "state_sha256"]
    losses = [[_loss(row[name]) for name in ("train_loss", "val_loss", "best_val_loss")] for row in rows]
    table = [
        [row["run_id"], row["status"], str(row["step"]), *cells, _hash(row["state_sha256"])]
        for row, cells in zip(rows, losses, strict=True)
    ]
    lines = [format_columns([head, *table]), ""]
    if changes:
        cells = [[row["field"], *map(_plain, row.get("values") or (row["first"], row["second"]))] for row in changes]
        lines += [format_columns([["config", *(row["run_id"] for row in rows)], *cells]), ""]
    else:
        lines.append("The configs are equal.")
    both = "both" if len(rows) == 2 else "all"
    if value["first_different_step"] is not None:
        lines.append(f"The training losses differ from step {value['first_different_step']} on.")
    elif value["compared_steps"]:
        lines.append(f"The training losses are equal at all {value['compared_steps']} steps that {both} logged.")
    if value["same_state"] is not None:
        lines.append(f"The final states are {'identical' if value['same_state'] else 'different'}.")
    lines += _best_line(value)
    return lines if value["same_state"] else [*lines, *_causes(value)]


def _best_line(value: dict[str, Any]) -> list[str]:
    best = value["best"]
    if best is None or value["same_state"]:
        return []
    if not best["margin"]:
        return [f"The best validation losses are equal: {_loss(best['best_val_loss'])}."]
    line = f"Best: {best['run_id']}, validation loss {_loss(best['best_val_loss'])}, lower by {_loss(best['margin'])}."
    has_other_data = any(row["field"].startswith("data.") for row in value["config_differences"])
    return [f"{line} Their data differs, so the losses may not be comparable." if has_other_data else line]


def _causes(value: dict[str, Any]) -> list[str]:
    """Differences between the machines that change results in the last bits."""
    labels = {"architectures": "CPU architecture", "threads": "number of CPU threads"}
    ids = [row["run_id"] for row in value["runs"]]
    lines = []
    for name, label in labels.items():
        found = value[name]
        if all(found) and (len({str(each) for each in found}) > 1 or any(len(each) > 1 for each in found)):
            each_run = ", ".join(
                f"{' then '.join(map(str, each))} in {run_id}" for each, run_id in zip(found, ids, strict=True)
            )
            lines.append(f"The {label} differs: {each_run}.")
    note = "Results are bit-identical only on the same architecture with the same number of threads."
    return [*lines, note] if lines else []


def prune_lines(result: Pruned, is_deleted: bool) -> list[str]:
    verb = "deleted" if is_deleted else "would be deleted"
    lines = []
    for candidate in result.deleted:
        names = [path.name for path in candidate.paths if path != candidate.run.path]
        what = f"{candidate.run.run_id}: {', '.join(names)}" if names else candidate.run.run_id
        lines.append(f"{what} {verb} ({format_bytes(candidate.bytes)})")
    lines += [f"{candidate.run.run_id} is kept: {candidate.reason}" for candidate in result.kept]
    if not result.deleted:
        return [*lines, "Nothing to delete."]
    total = f"{plural(len(result.deleted), 'run')}, {format_bytes(result.bytes)}"
    return [*lines, f"{total} freed." if is_deleted else f"{total}. Pass --yes to delete."]


def description_lines(value: dict[str, Any]) -> list[str]:
    """`runs show`: as YAML, but rows as tables, and of the config only what differs from the defaults."""
    beats = [{**beat, "time": _local_time(beat.get("time"))} for beat in value["ranks"]]
    shown = {**value, "ranks": beats, "config": changed_fields(value["config"])}
    title = "config (fields that differ from their defaults)"
    return _lines({title if key == "config" else key: item for key, item in shown.items()})


def _lines(value: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    inner = f"{indent}  "
    for key, item in value.items():
        if isinstance(item, dict) and item:
            lines += [f"{indent}{key}:", *_lines(item, inner)]
        elif isinstance(item, list) and item and all(isinstance(row, dict) for row in item):
            names = list(dict.fromkeys(name for row in item for name in row))
            table = format_columns([names, *([_plain(row.get(name)) for name in names] for row in item)])
            lines += [f"{indent}{key}:", *(inner + line for line in table.splitlines())]
        elif isinstance(item, str) and "\n" in item:
            lines += [f"{indent}{key}: |", *(inner + line for line in item.splitlines())]
        else:
            lines.append(f"{indent}{key}: {_plain(item)}")
    return lines


def _plain(value: Any) -> str:
    """A value without Python's quotes and words; `-` for nothing."""
    if value is None or value == []:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ", ".join(map(str, value))
    if isinstance(value, list | dict):
        return json.dumps(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _local_time(value: Any) -> str | None:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)) if isinstance(value, int | float) else None
    except (ValueError, OverflowError, OSError):  # damaged
        return None


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _hash(value: str | None) -> str:
    return "-" if value is None else f"{value[:HASH_SHOWN]}..."


def _count(value: int | None) -> str:
    """34688 -> `34.7k`"""
    if value is None:
        return "-"
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return str(value)
