"""What the page and the report show of a run, as JSON values. RunView reads the files."""

import shlex
from collections.abc import Callable, Sequence
from typing import Any

from llmtrain.plan.cost import cost_of_run
from llmtrain.plan.prediction import recorded_prediction, usage_of
from llmtrain.runs.explain import HEALTHY, Why, explain_local, last_report
from llmtrain.runs.generations import start_seconds
from llmtrain.runs.json_values import dictionary, epoch, finite, integer, short_text
from llmtrain.runs.sources import source_rows
from llmtrain.runs.state import RunState, state_after
from llmtrain.runs.task_scores import scored_steps, task_scores_at
from llmtrain.runs.view import RankView, RunView

Values = dict[str, Any]
_MAX_SHORT_WHY = 300
_MAX_SCORED_STEPS = 20
_MAX_SCORE_POINTS = 300
_MAX_SCORE_CURVES = 8
SCORE = "tasks/"
"""How the names of curves of scores begin."""


def run_row(view: RunView) -> Values:
    """The run in a list of runs. Reads only the end of its metrics, so that a thousand runs take less than a second."""
    train, val = view.last_rows
    return {
        "run_id": view.run.run_id,
        "name": short_text(view.meta.get("name")),
        "state": view.state,
        "why": _short_why(view),
        "step": view.step,
        "max_steps": view.max_steps,
        "loss": finite(train.get("train/loss")),
        "val_loss": finite(val.get("val/loss")) or finite(view.result.get("final_val_loss")),
        "best_val_loss": view.best_val_loss,
        "tokens_per_second": finite(train.get("train/tokens_per_second")),
        "mfu": finite(train.get("train/mfu")),
        "eta": _eta(view),
        "pods": 1,
        "processes": integer(view.last_start.get("world_size")) or 1,
        "restarts": max(0, integer(view.last_start.get("generation")) - 1),
        "gpu_hours": view.gpu_hours,
        **_cost(view),
        **_predicted(view),
        "seconds": view.seconds,
        **_setting(view),
        "started": epoch(view.meta.get("started_at")),
        "updated": view.updated,
        "sources": source_rows(train, val),
    }


def _cost(view: RunView) -> Values:
    """Rounded, so that the row of a running run does not change all the time."""
    found = cost_of_run(view)
    if found is None:
        return {"cost": None, "cost_projected": None, "currency": None}
    projected = None if found.projected is None else round(found.projected, 2)
    return {"cost": round(found.cost, 2), "cost_projected": projected, "currency": found.currency}


def _predicted(view: RunView) -> Values:
    """Memory and time of the whole run, predicted when it started, beside what it needs. Rounded as in _cost."""
    predicted = recorded_prediction(view)
    usage = usage_of(view)
    values: Values = {"peak_memory_bytes": usage.peak_memory_bytes, "total_seconds": None}
    values |= {"predicted_memory_bytes": None, "predicted_seconds": None}
    if usage.seconds is not None:
        values["total_seconds"] = round(usage.seconds)
    if predicted is not None:
        values["predicted_memory_bytes"] = predicted.peak_memory_bytes
        if predicted.seconds is not None:
            values["predicted_seconds"] = round(predicted.seconds)
    return values


def _setting(view: RunView) -> Values:
    """What distinguishes runs of one list: the fields of their configs that people vary, and the size of the model."""
    seed = view.setting("run").get("seed")
    model = view.setting("model")
    model_name = model.get("path") or model.get("size") or model.get("name")
    return {
        "lr": finite(view.setting("trainer").get("lr")),
        "seed": None if seed is None else integer(seed),
        "parameters": integer(view.result.get("parameters")) or None,
        "model": short_text(model_name) or None,
        "dataset": short_text(view.dataset) or None,
    }


def _short_why(view: RunView) -> str | None:
    if view.state == RunState.KILLED:
        newest = view.checkpoint_names[-1] if view.checkpoint_names else "none"
        return f"ended without an exit report; newest checkpoint: {newest}"
    if view.state not in (RunState.FAILED, RunState.INTERRUPTED):
        return None
    report = last_report(view)
    if report is None:
        return None
    return short_text(report.message)[:_MAX_SHORT_WHY] or None


def _eta(view: RunView) -> int | None:
    """When the run will finish, in seconds since the epoch, so that it is the same until the next row."""
    train, _ = view.last_rows
    left = finite(train.get("train/seconds_left"))
    at = finite(train.get("time"))
    if view.state != RunState.RUNNING or left is None or not at:
        return None
    end = finite(at + left)
    return None if end is None else round(end)


def run_details(view: RunView) -> Values:
    """What changes seldom: marks for the curves, checkpoints, starts, commands and machine."""
    machine = dictionary(view.meta.get("machine"))
    shown_machine = {}
    for name in ("host", "device", "platform", "python"):
        if machine.get(name):
            shown_machine[name] = short_text(machine[name])
    git = dictionary(view.meta.get("git"))
    return {
        "run_id": view.run.run_id,
        "path": str(view.run.shown()),
        "marks": marks(view),
        "checkpoints": [vars(checkpoint) for checkpoint in view.checkpoints()],
        "generations": [_start(row, end) for row, end in zip(view.generations, view.ends, strict=True)],
        "commands": commands(view),
        "machine": shown_machine,
        "git": short_text(git.get("sha")) or None,
        "parameters": integer(view.result.get("parameters")) or None,
        "samples": view.sample_steps(),
        "task_scores": scores_of(view, _MAX_SCORED_STEPS),
        "has_end_sample": bool(end_sample(view)),
        "logs": view.log_ranks(),
    }


def score_curves(scored: list[Values], place: Callable[[int], float | None]) -> Values:
    """Scores on tasks over the steps: those that the newest evaluation has first. `place`: where a step is on the
    axis."""
    names = list(dict.fromkeys(name for each in reversed(scored) for name in each["values"]))
    curves = {}
    for name in names[:_MAX_SCORE_CURVES]:
        points = [(place(each["step"]), each["values"].get(name)) for each in scored]
        shown = [(x, y) for x, y in points if x is not None and y is not None]
        if shown:
            x, y = zip(*shown, strict=True)
            curves[SCORE + name] = {"x": list(x), "y": list(y), "total": len(shown)}
    return curves


def scores_of(view: RunView, most: int = _MAX_SCORE_POINTS) -> list[Values]:
    """The newest scores on tasks: step, and `NAME/METRIC` -> value."""
    found = []
    for step in scored_steps(view.run)[-most:]:
        values = {}
        for task, score in task_scores_at(view.run, step).items():
            for metric, value in score["metrics"].items():
                values[short_text(f"{task}/{metric}")] = finite(value)
        found.append({"step": step, "values": values})
    return found


def end_sample(view: RunView) -> list[Values]:
    """The sample that a run writes when it finishes, in the form of RunView.samples; empty if there is none."""
    sample = view.result.get("sample")
    if not isinstance(sample, str) or not sample.strip():
        return []
    return [{"prompt": short_text(view.result.get("sample_prompt")), "answer": short_text(sample)}]


def marks(view: RunView) -> list[Values]:
    """Where the run restarted, was interrupted or failed, and saved a checkpoint."""
    found = []
    for position, row in enumerate(view.generations):
        if position:
            found.append({"kind": "restart", "step": row["from_step"], "text": f"start {row['generation']}"})
        state = state_after(row.get("ended"))
        is_open = row is view.last_start and row.get("ended") is None
        if state == RunState.FINISHED or is_open:
            continue
        if isinstance(row.get("step"), int):  # a start that was killed did not record its last step
            found.append({"kind": state, "step": row["step"], "text": state})
    for name in view.checkpoint_names:
        found.append({"kind": "checkpoint", "step": int(name.removeprefix("step_")), "text": f"checkpoint {name}"})
    return found


def _start(row: Values, end: float | None) -> Values:
    values: Values = {}
    for name in ("generation", "from_step", "to_step", "step", "world_size", "crashes"):
        values[name] = row.get(name) if isinstance(row.get(name), int) else None
    return {
        **values,
        "host": short_text(row.get("host")),
        "start_seconds": start_seconds(row.get("start_seconds")),
        "started": epoch(row.get("started_at")),
        "until": end,
        "ended": None if row.get("ended") is None else state_after(row["ended"]),
    }


def commands(view: RunView) -> list[Values]:
    """The exact commands to resume a run that has not finished, to use it and to export it."""
    directory = shlex.quote(f"{view.run.run_id}-model")
    use = [
        {"what": "Generate text", "command": f"llmtrain generate {view.argument}"},
        {"what": "Export", "command": f"llmtrain export {view.argument} --to {directory}"},
    ]
    if view.is_finished:  # a resume would only say so
        return use
    return [{"what": "Resume", "command": view.resume_command}, *use]


def why(view: RunView) -> Values | None:
    """Cause, evidence and remedy of a run that is not healthy; None if nothing is wrong."""
    found = explain_local(view)
    return None if found.cause in HEALTHY else why_values(found)


def why_values(why: Why) -> Values:
    return {"cause": why.cause, "what": why.what, "evidence": why.evidence, "remedy": why.remedy}


def compact_ranks(ranks: Sequence[RankView]) -> Values:
    """Columns, with each host once: 512 ranks in 6 KB."""
    hosts = sorted({rank.host for rank in ranks})
    number = {host: index for index, host in enumerate(hosts)}
    return {
        "rank": [rank.rank for rank in ranks],
        "step": [rank.step for rank in ranks],
        "time": [rank.time for rank in ranks],
        "host": [number[rank.host] for rank in ranks],
        "hosts": hosts,
    }


def shown_config(view: RunView) -> Values:
    """The config with the names of the current schema; a link out of the run directory is not followed."""
    return view.current_config if view.is_inside(view.run.config) else {}
