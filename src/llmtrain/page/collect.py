"""What the page and the report show of a run directory, as plain values. No torch, no server, no cluster.

Everything in a run directory may be damaged, written by another user, or disappear meanwhile: each function returns
what can be read.
"""

import os
import shlex
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmtrain.config.upgrade import upgraded_values
from llmtrain.files import is_there, read_json
from llmtrain.page.run_files import is_inside, last_rows, log_ranks
from llmtrain.page.values import epoch, finite
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.exit_report import ExitReport, parse_report
from llmtrain.runs.generations import MAX_GENERATIONS, read_generations
from llmtrain.runs.heartbeats import read_heartbeats
from llmtrain.runs.lock import is_held
from llmtrain.runs.manifest import MANIFEST, step_of
from llmtrain.runs.summary import checkpoint_names, config_values, pointed_checkpoint, read_meta

Values = dict[str, Any]
SILENT_AFTER_SEC = 30.0
"""A rank without a heartbeat for this long stands out; heartbeats are written every two seconds."""
MAX_TEXT = 20_000
"""Characters of a message, a prompt or an answer that are shown."""
_MAX_SAMPLES = 50
_MAX_INTEGER = 1 << 53
"""Beyond that a browser does not know an integer exactly; no step, rank or size is as large."""
_ENDED = {"stopped": "interrupted", "failed": "failed", "refused": "failed", "finished": "finished"}


def run_row(run: RunDirectory) -> Values:
    """The run in a list of runs. Reads only the end of its metrics, so that a thousand runs take less than a second."""
    generations, meta = _generations(run), read_meta(run)
    result = dictionary(run.finished)
    train, val = last_rows(run.metrics)
    report = newest_report(run)
    state = run_state(run, generations)
    last = generations[-1] if generations else {}
    started, updated = epoch(meta.get("started_at")), train.get("time") or val.get("time")
    return {
        "run_id": run.run_id,
        "name": _text(meta.get("name")),
        "state": state,
        "why": _short_why(state, report, last),
        "step": max(_integer(train.get("step")), _integer(val.get("step")), _integer(last.get("step"))),
        "max_steps": _integer(last.get("to_step")) or None,
        "loss": finite(train.get("train/loss")),
        "val_loss": finite(val.get("val/loss")) or finite(result.get("final_val_loss")),
        "tokens_per_second": finite(train.get("train/tokens_per_second")),
        "mfu": finite(train.get("train/mfu")),
        "eta": _eta(state, train),
        "pods": 1,
        "processes": _integer(last.get("world_size")) or 1,
        "restarts": max(0, _integer(last.get("generation")) - 1),
        "gpu_hours": gpu_hours(run, generations, meta, state, finite(updated)),
        "started": started,
        "updated": finite(updated),
    }


def run_details(run: RunDirectory) -> Values:
    """What changes seldom: marks for the curves, checkpoints, starts, commands and machine."""
    generations, meta = _generations(run), read_meta(run)
    ends = _ends(run, generations, run_state(run, generations), _last_time(run))
    machine, git = _section(meta, "machine"), _section(meta, "git")
    result = dictionary(run.finished)
    return {
        "run_id": run.run_id,
        "path": str(run.shown()),
        "marks": marks(run, generations),
        "checkpoints": checkpoints(run),
        "generations": [_generation(row, end) for row, end in zip(generations, ends, strict=True)],
        "commands": commands(run),
        "machine": {
            name: _text(machine.get(name)) for name in ("host", "device", "platform", "python") if machine.get(name)
        },
        "git": _text(git.get("sha")) or None,
        "parameters": _integer(result.get("parameters")) or None,
        "samples": sample_steps(run),
        "logs": log_ranks(run),
    }


def run_state(run: RunDirectory, generations: list[Values]) -> str:
    """running, finished, interrupted, failed, crashed, or `not started`."""
    if is_held(run.lock):
        return "running"
    if is_there(run.finished):
        return "finished"
    if not generations:
        return "not started"
    return _ENDED.get(str(generations[-1].get("ended")), "crashed")


def why(run: RunDirectory) -> Values | None:
    """Cause, evidence and remedy of a run that is not healthy; None if nothing is wrong."""
    generations = _generations(run)
    state = run_state(run, generations)
    if state == "running":
        return _why_silent(run)
    if state in ("finished", "not started"):
        return None
    last, report = generations[-1], newest_report(run)
    resume = f"Resume it: {_resume(run)}"
    evidence = [
        f"Start {last['generation']} of the run on {_text(last.get('host'))} began at step {last['from_step']}."
    ]
    if report is None or (report.generation or last["generation"]) != last["generation"]:
        what = "The last start ended without an exit report: it was killed, or the machine went down."
        return {"cause": "crash", "what": what, "evidence": evidence, "remedy": resume}
    evidence.append(
        f"Exit code {report.exit_code} at {report.time[:40]}" + (f", step {report.step}." if report.step else ".")
    )
    evidence += (
        [f"Ranks without a heartbeat: {', '.join(map(str, report.silent_ranks))}."] if report.silent_ranks else []
    )
    remedy = report.remedy or ""
    remedy = remedy if "resume" in remedy.lower() else f"{remedy} {resume}".strip()
    cause = report.reason or ("interrupted" if state == "interrupted" else report.error or "crash")
    return {"cause": _text(cause)[:80], "what": _text(report.message), "evidence": evidence, "remedy": _text(remedy)}


def _why_silent(run: RunDirectory) -> Values | None:
    silent = [beat for beat in ranks(run) if beat["age"] > SILENT_AFTER_SEC]
    if not silent:
        return None
    oldest = max(silent, key=lambda beat: float(beat["age"]))
    names = ", ".join(str(beat["rank"]) for beat in silent[:8]) + (", ..." if len(silent) > 8 else "")
    return {
        "cause": "rank_silent",
        "what": f"No heartbeat from rank {names} for {oldest['age']:.0f} s.",
        "evidence": [f"Rank {beat['rank']} on {beat['host']}: last step {beat['step']}." for beat in silent[:4]],
        "remedy": "Check the process on that machine. The other ranks stop with an error when they time out.",
    }


def ranks(run: RunDirectory) -> list[Values]:
    """The last heartbeat of each rank: step, time, age in seconds by this machine's clock, and host."""
    now = time.time()
    return [
        {
            "rank": rank,
            "step": _integer(beat.get("step")),
            "time": round(finite(beat.get("time")) or now),
            "age": round(max(0.0, now - (finite(beat.get("time")) or now)), 1),
            "host": _text(beat.get("host"))[:80],
        }
        for rank, beat in sorted(read_heartbeats(run.heartbeats).items())
    ]


def compact_ranks(rows: list[Values]) -> Values:
    """Columns, with each host once: 512 ranks in 6 KB."""
    hosts = sorted({row["host"] for row in rows})
    number = {host: index for index, host in enumerate(hosts)}
    columns = {name: [row[name] for row in rows] for name in ("rank", "step", "time")}
    return {**columns, "host": [number[row["host"]] for row in rows], "hosts": hosts}


def marks(run: RunDirectory, generations: list[Values]) -> list[Values]:
    """Where the run restarted, was interrupted or failed, and saved a checkpoint."""
    found = []
    for position, row in enumerate(generations):
        if position:
            found.append({"kind": "restart", "step": row["from_step"], "text": f"start {row['generation']}"})
        ended = _ENDED.get(str(row.get("ended")), "crashed")
        is_last = position == len(generations) - 1
        if ended != "finished" and isinstance(row.get("step"), int) and not (is_last and row.get("ended") is None):
            found.append({"kind": ended, "step": row["step"], "text": ended})
    saved = [step for name in checkpoint_names(run) if (step := step_of(name)) is not None]
    return found + [{"kind": "checkpoint", "step": step, "text": f"checkpoint step_{step}"} for step in saved]


def checkpoints(run: RunDirectory) -> list[Values]:
    """Name, step, bytes and time of each checkpoint, and whether it is the latest or the best."""
    latest, best = pointed_checkpoint(run, "latest"), pointed_checkpoint(run, "best")
    rows = []
    for name in checkpoint_names(run):
        manifest = run.checkpoints / name / MANIFEST
        files = dictionary(manifest).get("files")
        sizes = [row.get("bytes") for row in files.values() if isinstance(row, dict)] if isinstance(files, dict) else []
        rows.append(
            {
                "name": name,
                "step": step_of(name),
                "bytes": sum(size for size in sizes if isinstance(size, int)) if sizes else None,
                "time": _mtime(manifest),
                "is_latest": name == latest,
                "is_best": name == best,
            }
        )
    return rows


def sample_steps(run: RunDirectory) -> list[int]:
    """The last steps with answers to trainer.eval_prompts."""
    if not is_inside(run, run.samples):
        return []
    steps = [step for path in run.samples.glob("step_*.json") if (step := step_of(path.stem)) is not None]
    return sorted(steps)[-_MAX_SAMPLES:]


def samples(run: RunDirectory, step: int) -> list[Values]:
    path = run.samples / f"step_{step}.json"
    rows = read_json(path) if is_inside(run, path) else None
    return [
        {"prompt": _text(row.get("prompt")), "answer": _text(row.get("answer"))}
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict)
    ]


def resolved_config(run: RunDirectory) -> dict[str, Any]:
    """With the names of the current schema."""
    return upgraded_values(config_values(run)) if is_inside(run, run.config) else {}


def commands(run: RunDirectory) -> list[Values]:
    """The exact commands to resume, use and export the run."""
    name = _argument(run)
    return [
        {"what": "Resume", "command": _resume(run)},
        {"what": "Generate text", "command": f"llmtrain generate --run {name}"},
        {"what": "Export", "command": f"llmtrain export --run {name} --to {shlex.quote(run.run_id + '-model')}"},
    ]


def _resume(run: RunDirectory) -> str:
    return f"llmtrain train --resume {_argument(run)}"


def _argument(run: RunDirectory) -> str:
    """The run id where that is enough, else the path."""
    return run.run_id if str(run.shown().parent) == "runs" else shlex.quote(str(run.shown()))


def newest_report(run: RunDirectory) -> ExitReport | None:
    """The exit report that was written last."""
    try:
        names = sorted(name for name in os.listdir(run.exits) if name.endswith(".json"))  # noqa: PTH208 (fast)
    except OSError:
        return None
    return parse_report(read_json(run.exits / names[-1])) if names else None


def gpu_hours(
    run: RunDirectory, generations: list[Values], meta: Values, state: str, updated: float | None
) -> float | None:
    """Hours of all processes of all starts; None on a CPU."""
    if not str(_section(meta, "machine").get("device")).startswith("cuda") or not generations:
        return None
    hours, last = 0.0, None if state == "running" else updated
    ends = _ends(run, generations, state, updated) if len(generations) > 1 else [last]  # a list has many runs
    for row, end in zip(generations, ends, strict=True):
        begin, end = epoch(row.get("started_at")), time.time() if end is None and state == "running" else end
        if begin is not None and end is not None:
            hours += max(0.0, end - begin) / 3600 * (_integer(row.get("world_size")) or 1)
    return round(hours, 2)


def _ends(run: RunDirectory, generations: list[Values], state: str, updated: float | None) -> list[float | None]:
    """When each start ended. One without an exit report ended at the next start or with the last row of metrics; None
    for the start that is running."""
    times = _report_times(run.exits, _mtime(run.exits))
    following = [*(epoch(row.get("started_at")) for row in generations[1:]), None if state == "running" else updated]
    return [times.get(row["generation"]) or end for row, end in zip(generations, following, strict=False)]


@lru_cache(maxsize=64)
def _report_times(exits: Path, changed: float | None) -> dict[int, float]:
    """Generation -> time of its exit reports; read again when the directory has `changed`."""
    reports = [parse_report(read_json(path)) for path in exits.glob("*.json")] if changed is not None else []
    times = ((report.generation, epoch(report.time)) for report in reports if report is not None)
    return {generation: at for generation, at in times if generation is not None and at is not None}


def _last_time(run: RunDirectory) -> float | None:
    train, val = last_rows(run.metrics)
    return finite(train.get("time") or val.get("time"))


def _short_why(state: str, report: ExitReport | None, last: Values) -> str | None:
    if state == "crashed":
        return "ended without an exit report"
    if state not in ("failed", "interrupted") or report is None:
        return None
    is_own = report.generation is None or report.generation == last.get("generation")
    return _text(report.message)[:300] or None if is_own else None


def _eta(state: str, train: Values) -> float | None:
    """When the run will finish, in seconds since the epoch, so that it is the same until the next row."""
    left, at = finite(train.get("train/seconds_left")), finite(train.get("time"))
    end = finite(at + left) if state == "running" and left is not None and at else None
    return None if end is None else round(end)


def _generations(run: RunDirectory) -> list[Values]:
    """The last starts of a run, without damaged rows."""
    return [
        row
        for row in read_generations(run)[-MAX_GENERATIONS:]
        if all(abs(value) < _MAX_INTEGER for value in row.values() if isinstance(value, int))
    ]


def _generation(row: Values, end: float | None) -> Values:
    names = ("generation", "from_step", "to_step", "step", "world_size", "crashes")
    return {
        **{name: row.get(name) if isinstance(row.get(name), int) else None for name in names},
        "host": _text(row.get("host")),
        "started": epoch(row.get("started_at")),
        "until": end,
        "ended": _ENDED.get(str(row.get("ended"))),
    }


def _section(values: Values, name: str) -> Values:
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def dictionary(path: Path) -> Values:
    """The object in a JSON file; empty if there is none."""
    value = read_json(path)
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return "" if value is None else str(value)[:MAX_TEXT]


def _integer(value: Any) -> int:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return value if is_integer and abs(value) < _MAX_INTEGER else 0


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
