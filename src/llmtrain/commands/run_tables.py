"""The text that `llmtrain runs` prints."""

import json
import sys
import time
from typing import Any

from llmtrain.config.schema import changed_fields
from llmtrain.core.terminal import Color, format_columns, format_table, stream_width
from llmtrain.core.text import format_bytes, plural
from llmtrain.runs.groups import LOSSES, is_of_setting
from llmtrain.runs.listing import age_of
from llmtrain.runs.prune import Pruned
from llmtrain.runs.state import RunState

Row = dict[str, Any]
HASH_SHOWN = 16
BEST_MARK = "*"
_DROPPED_FIRST = ("dataset", "parameters", "train_loss", "lr", "age", "best")


def run_table(rows: list[Row]) -> str:
    """The columns that matter most come first; those after them are shown if there is room. `*`: the best run."""
    head = ["run_id", "status", "step", "val_loss", "best", "age", "lr", "train_loss", "parameters", "dataset"]
    best = _best_of(rows)
    has_damage = any(row["damaged"] for row in rows)
    if has_damage:
        head.append("damaged")
    lines = [head]
    for row in rows:
        cells = [
            row["run_id"],
            _status(row),
            f"{row['step']}/{plain(row['max_steps'])}",
            loss_text(row["val_loss"]),
            _marked(row["best_val_loss"], best),
            plain(age_of(row)),
            plain(row["lr"]),
            loss_text(row["train_loss"]),
            count_text(row["parameters"]),
            plain(row["dataset"]),
        ]
        if has_damage:
            cells.append(", ".join(row["damaged"]) or "-")
        lines.append(cells)
    return format_table(lines, _DROPPED_FIRST)


def _best_of(rows: list[Row]) -> float | None:
    """The lowest validation loss of several runs; None if they have other data, where losses cannot be compared."""
    with_loss = [row for row in rows if row["best_val_loss"] is not None]
    if len(with_loss) < 2 or len({row["dataset"] for row in with_loss}) > 1:
        return None
    lowest: float = min(row["best_val_loss"] for row in with_loss)
    return lowest


def best_colors(rows: list[Row]) -> dict[str, Color]:
    """The color of the best loss in run_table."""
    best = _best_of(rows)
    return {} if best is None else {_marked(best, best): "green"}


def _marked(loss: float | None, best: float | None) -> str:
    if best is None:
        return loss_text(loss)
    return f"{loss_text(loss)}{BEST_MARK if loss == best else ' '}"


def _status(row: Row) -> str:
    """A killed run with the checkpoint that a resume begins with: the steps after it are lost."""
    if row["status"] == RunState.KILLED and row["latest"]:
        return f"{row['status']} ({row['latest']})"
    return str(row["status"])


def comparison_lines(value: dict[str, Any]) -> list[str]:
    """`runs compare`: the runs, their configs, whether they are equal, and which is best."""
    lines = [_compared_runs(value["runs"]), ""]
    if value["config_differences"]:
        lines += [_config_differences(value), ""]
    else:
        lines.append("The configs are equal.")
    both = "both" if len(value["runs"]) == 2 else "all"
    if value["first_different_step"] is not None:
        lines.append(f"The training losses differ from step {value['first_different_step']} on.")
    elif value["compared_steps"]:
        lines.append(f"The training losses are equal at all {value['compared_steps']} steps that {both} logged.")
    if value["same_state"] is not None:
        lines.append(_states_line(value))
    if _has_samples(value["groups"]) and len(value["groups"]) > 1:
        lines += ["", _group_table(value), ""]
    lines += _best_line(value)
    if not value["same_state"]:
        lines += _causes(value)
    return lines


def _states_line(value: dict[str, Any]) -> str:
    if value["same_state"]:
        return "The final states are identical."
    by_state: dict[str, list[str]] = {}
    for row in value["runs"]:
        by_state.setdefault(row["state_sha256"], []).append(row["run_id"])
    equal = [" and ".join(names) for names in by_state.values() if len(names) > 1]
    if not equal:
        return "The final states are different."
    return f"The final states of {', and of '.join(equal)} are identical, the others are different."


def _compared_runs(rows: list[Row]) -> str:
    tasks = sorted({name for row in rows for name in row["task_scores"]})
    table = [["run_id", "status", "step", *LOSSES, *tasks, "state_sha256"]]
    for row in rows:
        scores = [loss_text(row["task_scores"].get(name)) for name in tasks]
        losses = [*_losses(row), *scores]
        table.append([row["run_id"], row["status"], str(row["step"]), *losses, _hash(row["state_sha256"])])
    return format_table(table, dropped_first=["state_sha256", "train_loss"])


def _config_differences(value: dict[str, Any]) -> str:
    """One row per field, one column per run; as several tables if they do not fit beside each other."""
    table = [["config", *_run_ids(value)]]
    for row in value["config_differences"]:
        values = row.get("values") or (row["first"], row["second"])  # of two runs each value has its own key
        table.append([row["field"], *map(plain, values)])
    count = len(table[0]) - 1
    while count > 1 and not _fits([row[: count + 1] for row in table]):
        count -= 1
    parts = []
    for first in range(1, len(table[0]), count):
        parts.append(format_table([[row[0], *row[first : first + count]] for row in table]))
    return "\n\n".join(parts)


def _fits(table: list[list[str]]) -> bool:
    """Whether standard output is wide enough, if it is a terminal."""
    width = stream_width(sys.stdout)
    return width is None or max(map(len, format_columns(table).splitlines())) <= width


def _run_ids(value: dict[str, Any]) -> list[str]:
    return [row["run_id"] for row in value["runs"]]


def _has_samples(groups: list[dict[str, Any]]) -> bool:
    """Whether a group has several runs, so that its losses have a mean."""
    return any(group["n"] > 1 for group in groups)


def group_lines(value: dict[str, Any]) -> list[str]:
    """`runs compare --group-by`: a row per group, and which group is best."""
    notes = _best_line(value)
    if value["mixed_fields"]:
        mixed = ", ".join(value["mixed_fields"])
        option = " ".join(f"--group-by {field}" for field in value["mixed_fields"])
        notes.append(f"Runs of one group differ in more than the seed: {mixed}. Add {option}.")
    lines = [_group_table(value)]
    if notes:
        lines += ["", *notes]
    return lines


def _group_table(value: dict[str, Any]) -> str:
    """Mean and standard deviation of the losses of each group."""
    rows = [[*value["group_by"], "n", *LOSSES, "runs"]]
    for group in value["groups"]:
        fields = [plain(each) for each in group["values"].values()]
        losses = [_mean(group[name]) for name in LOSSES]
        rows.append([*fields, str(group["n"]), *losses, ", ".join(group["run_ids"])])
    return format_table(rows, dropped_first=["train_loss"])


def _best_line(value: dict[str, Any]) -> list[str]:
    best = value["best"]
    groups = value["groups"]
    if value["same_state"]:
        return []
    objectives = dict.fromkeys(value["objectives"])
    if len(objectives) > 1:
        return [f"Their objectives differ ({', '.join(objectives)}), so the losses cannot be compared."]
    if best is None:
        only = groups[0]["best_val_loss"]
        if len(groups) > 1 or only["n"] < 2 or value["group_by"]:
            return []
        return [
            f"Model, data and trainer are equal: {only['n']} samples of one setting, best validation loss "
            f"{_mean(only)} (mean ± standard deviation)."
        ]
    if not best["margin"]:
        return [f"The best validation losses are equal: {loss_text(best['best_val_loss'])}."]
    winners = [group for group in groups if group["best_val_loss"]["mean"] == best["best_val_loss"]]
    names = " and ".join(_group_name(group) for group in winners)
    what = "mean validation loss" if _has_samples(winners) else "validation loss"
    sentences = [f"Best: {names}, {what} {loss_text(best['best_val_loss'])}, lower by {loss_text(best['margin'])}."]
    # A difference below the spread of equal settings may be chance.
    deviation = max((group["best_val_loss"]["standard_deviation"] or 0.0 for group in groups), default=0.0)
    if best["margin"] < deviation:
        sentences.append(f"The runs of one group differ by more (standard deviation {loss_text(deviation)}).")
    close = best["not_distinguishable_from"]
    if close:
        names = " and ".join(_group_name(group) for group in close)
        sentences.append(f"Not distinguishable from {names} (Welch's t-test, 5 %).")
    if _has_other_data(value):
        sentences.append("Their data differs, so the losses may not be comparable.")
    return [" ".join(sentences)]


def _has_other_data(value: dict[str, Any]) -> bool:
    fields = [row["field"] for row in value["config_differences"]]
    return any(field.startswith("data.") and is_of_setting(field) for field in fields)


def _group_name(group: dict[str, Any]) -> str:
    """`trainer.lr 0.001`, or the runs of one setting: `a, b`"""
    values = group["values"]
    if not values:
        return " and ".join(group["run_ids"])
    return ", ".join(f"{field} {plain(value)}" for field, value in values.items())


def _causes(value: dict[str, Any]) -> list[str]:
    """Differences between the machines that change results in the last bits."""
    labels = {"architectures": "CPU architecture", "threads": "number of CPU threads"}
    lines = []
    for name, label in labels.items():
        found = value[name]  # per run, the values of its starts: a resume may be on another machine
        differs = len({str(values) for values in found}) > 1 or any(len(values) > 1 for values in found)
        if not all(found) or not differs:
            continue
        parts = []
        for run_id, values in zip(_run_ids(value), found, strict=True):
            parts.append(f"{' then '.join(map(str, values))} in {run_id}")
        lines.append(f"The {label} differs: {', '.join(parts)}.")
    if lines:
        lines.append("Results are bit-identical only on the same architecture with the same number of threads.")
    return lines


def prune_lines(result: Pruned, is_deleted: bool) -> list[str]:
    verb = "deleted" if is_deleted else "would be deleted"
    lines = []
    for candidate in result.deleted:
        what = candidate.run.run_id
        names = [path.name for path in candidate.paths if path != candidate.run.path]
        if names:  # only these checkpoints of it
            what += f": {', '.join(names)}"
        lines.append(f"{what} {verb} ({format_bytes(candidate.bytes)})")
    for candidate in result.kept:
        lines.append(f"{candidate.run.run_id} is kept: {candidate.reason}")
    total = f"{plural(len(result.deleted), 'run')}, {format_bytes(result.bytes)}"
    if not result.deleted:
        lines.append("Nothing to delete.")
    elif is_deleted:
        lines.append(f"{total} freed.")
    else:
        lines.append(f"{total}. Pass --yes to delete.")
    return lines


def description_lines(value: dict[str, Any]) -> list[str]:
    """`runs show --all`: as YAML, but rows as tables, and of the config only what differs from the defaults."""
    shown = dict(value)
    shown["ranks"] = [{**beat, "time": _local_time(beat.get("time"))} for beat in value["ranks"]]
    shown["config (fields that differ from their defaults)"] = changed_fields(shown.pop("config"))
    return _lines(shown)


def _lines(value: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    inner = f"{indent}  "
    for key, item in value.items():
        if isinstance(item, dict) and item:
            lines += [f"{indent}{key}:", *_lines(item, inner)]
        elif isinstance(item, list) and item and all(isinstance(row, dict) for row in item):
            lines += [f"{indent}{key}:", *_table(item, inner)]
        elif isinstance(item, str) and "\n" in item:
            lines += [f"{indent}{key}: |", *_indented(item, inner)]
        else:
            lines.append(f"{indent}{key}: {plain(item)}")
    return lines


def _indented(text: str, indent: str) -> list[str]:
    return [indent + line for line in text.splitlines()]


def _table(rows: list[Row], indent: str) -> list[str]:
    """A column per key that any of the rows has; where that is too wide, a list."""
    names: dict[str, None] = {}  # a set that keeps the order
    for row in rows:
        names.update(dict.fromkeys(row))
    table = [list(names)]
    for row in rows:
        table.append([plain(row.get(name)) for name in names])
    width = stream_width(sys.stdout)
    lines = _indented(format_columns(table), indent)
    if width is None or max(map(len, lines)) <= width:
        return lines
    listed = []
    for row in rows:
        first, *others = _lines(row, f"{indent}  ")
        listed += [f"{indent}- {first.strip()}", *others]
    return listed


def plain(value: Any) -> str:
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
    if not isinstance(value, int | float):
        return None
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    except (ValueError, OverflowError, OSError):  # damaged
        return None


def _losses(row: Row) -> list[str]:
    return [loss_text(row[name]) for name in LOSSES]


def loss_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _mean(statistics: dict[str, Any]) -> str:
    """`2.8502 ± 0.0131`; one sample has no deviation."""
    mean = loss_text(statistics["mean"])
    deviation = statistics["standard_deviation"]
    return mean if deviation is None else f"{mean} ± {loss_text(deviation)}"


def _hash(value: str | None) -> str:
    return "-" if value is None else f"{value[:HASH_SHOWN]}..."


def count_text(value: int | None) -> str:
    """34688 -> `34.7k`"""
    if value is None:
        return "-"
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return str(value)
