"""The text of `llmtrain runs show`: what one wants to know about a run, in about fifteen lines."""

import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

from llmtrain.commands.options import DEFAULT_ROOT
from llmtrain.commands.run_tables import count_text, loss_text, plain
from llmtrain.core.text import first_names, format_bytes, plural
from llmtrain.plan.cost import RunCost, cost_text
from llmtrain.plan.prediction import Prediction, Usage, beside
from llmtrain.runs.generations import start_seconds
from llmtrain.runs.listing import age_of
from llmtrain.runs.progress_lines import duration_text
from llmtrain.runs.sources import source_table
from llmtrain.runs.state import RunState

Row = dict[str, Any]
LABEL_WIDTH = 12


def summary_lines(value: Row, cost: RunCost | None, predicted: Prediction | None, usage: Usage) -> list[str]:
    """`value`: of runs.listing.describe, with `gpu_hours`."""
    facts = {
        "run": _run(value),
        "status": value["status"],
        "step": f"{value['step']} of {plain(value['max_steps'])}",
        "loss": f"train {loss_text(value['train_loss'])}, validation {loss_text(value['val_loss'])}",
        "pairs": _pairs(value["pairs"]),
        "best": _best(value),
        "model": _model(value),
        "data": value["dataset"],
        "objective": _objective(value),
        "trainer": _trainer(value),
        "speed": _speed(value),
        "memory": _memory(predicted, usage),
        "time": _time(predicted, usage),
        "cost": cost_text(value["gpu_hours"], cost),
        "started": _started(value),
        "start-up": _start_up(value),
        "last written": None if value["status"] == RunState.FINISHED else value["last_written"],
        "checkpoints": first_names(value["checkpoints"][::-1], 4) or None,
        "state": value["state_sha256"] and f"sha256 {value['state_sha256'][:16]}...",
        "directory": value["path"],
        "damaged": ", ".join(value["damaged"]) or None,
    }
    facts["more"] = f"llmtrain runs show {shlex.quote(_argument(value))} --all, or --plot for its curves"
    lines = [f"{name:{LABEL_WIDTH}}  {fact}" for name, fact in facts.items() if fact is not None]
    if value["sources"]:
        lines += ["", *source_table(value["sources"])]
    return lines


def _argument(value: Row) -> str:
    """The run as one passes it to a command: its id, or its path if it is not in the directory of runs."""
    if Path(value["path"]).parent == Path(DEFAULT_ROOT):
        return str(value["run_id"])
    return str(value["path"])


def _run(value: Row) -> str:
    if value["name"] in (None, value["run_id"]):
        return str(value["run_id"])
    return f"{value['run_id']} ({value['name']})"


def _best(value: Row) -> str | None:
    if value["best_val_loss"] is None:
        return None
    best = f"validation loss {value['best_val_loss']:.4f}"
    if value["best"]:
        best += f" ({value['best']})"
    return best


def _model(value: Row) -> str:
    model = plain(value["model"])
    if value["parameters"]:
        model += f", {count_text(value['parameters'])} parameters"
    return model


def _trainer(value: Row) -> str | None:
    """The settings that are varied most; a damaged config has none."""
    parts = []
    for section, field in (("trainer", "lr"), ("trainer", "micro_batch_size"), ("trainer", "grad_accum_steps")):
        parts.append((field, _part(value["config"], section).get(field)))
    parts.append(("seed", _part(value["config"], "run").get("seed")))
    return ", ".join(f"{field} {plain(setting)}" for field, setting in parts if setting is not None) or None


def _objective(value: Row) -> str | None:
    """`dpo, beta 0.1, label_smoothing 0, from sft at step 40`; None for next_token."""
    objective = _part(_part(value["config"], "trainer"), "objective")
    if objective.get("name") in (None, "next_token"):
        return None
    parts = [str(objective["name"])]
    parts += [f"{name} {plain(setting)}" for name, setting in objective.items() if name != "name"]
    origin = _part(value["meta"], "origin")
    if origin:
        parts.append(f"from {plain(origin.get('run_id'))} at step {plain(origin.get('step'))}")
    return ", ".join(parts)


def _pairs(metrics: Row | None) -> str | None:
    """`validation accuracy 75.0%, margin 0.7570, logps_chosen -8.1, logps_rejected -20.3, kl 0.13`"""
    if metrics is None:
        return None
    parts = [f"validation accuracy {metrics['accuracy']:.1%}"]
    for name in ("margin", "logps_chosen", "logps_rejected", "kl"):
        if metrics[name] is not None:
            parts.append(f"{name} {metrics[name]:.4f}")
    return ", ".join(parts)


def _speed(value: Row) -> str | None:
    result = _part(value, "result")
    rate = result.get("tokens_per_second")
    if not isinstance(rate, int | float):
        return None
    speed = f"{rate:,.0f} tokens/s on average"
    if result.get("device"):
        speed += f" on {result['device']}"
    world_size = result.get("world_size")
    if isinstance(world_size, int):
        speed += f", {plural(world_size, 'process')}"
    return speed


def _memory(predicted: Prediction | None, usage: Usage) -> str | None:
    """`23.3 GB, predicted 24.1 GB (+3 %) from a formula, ±25 %`"""
    if predicted is None or predicted.peak_memory_bytes is None:
        return beside(usage.peak_memory_bytes, None, format_bytes)
    shown = beside(usage.peak_memory_bytes, predicted.peak_memory_bytes, format_bytes)
    return f"{shown} {predicted.memory_source}"


def _time(predicted: Prediction | None, usage: Usage) -> str | None:
    """`0:10:12, predicted 0:11:00 (+8 %) from FLOPs ±40 %`: of the whole run."""
    if predicted is None or predicted.seconds is None:
        return beside(usage.seconds, None, duration_text)
    return f"{beside(usage.seconds, predicted.seconds, duration_text)} {predicted.time_source}"


def _started(value: Row) -> str | None:
    if value["started_at"] is None:
        return None
    age = age_of(value)
    if age is None:  # not a time
        return str(value["started_at"])
    started = f"{datetime.fromisoformat(value['started_at']).astimezone():%Y-%m-%d %H:%M:%S}, {age} ago"
    starts = len(value["generations"])
    if starts > 1:
        started += f"; {plural(starts, 'start')}"
    return started


def _start_up(value: Row) -> str | None:
    """`12.1 s, 7.8 s of it: loading torch`: of the last start that trained."""
    for row in reversed(value["generations"]):
        seconds = start_seconds(row.get("start_seconds"))
        if seconds:
            longest = max(seconds, key=seconds.__getitem__)
            return f"{sum(seconds.values()):.1f} s, {seconds[longest]:.1f} s of it: {longest}"
    return None


def _part(value: Any, name: str) -> Row:
    """The mapping of this name inside another one; empty if a damaged file has none."""
    part = value.get(name) if isinstance(value, dict) else None
    return part if isinstance(part, dict) else {}
