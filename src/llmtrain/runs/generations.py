"""generations.json: the numbered starts of a run, and how each ended.

A generation without a recorded end crashed. After three crashes in a row without a newer checkpoint, an unattended
start gives up. An interruption is not a crash, and a new launch (LLMTRAIN_LAUNCH) starts a new count.
"""

import os
import socket
import threading
import time
from typing import Any

from llmtrain.core.env import LAUNCH
from llmtrain.core.files import is_full, read_json, write_json, write_json_in_place
from llmtrain.errors import TrainingFailed
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.json_values import dictionary, finite, short_text
from llmtrain.runs.metadata import cpu_architecture
from llmtrain.runs.state import EndStatus

MAX_CRASHES = 3
MAX_GENERATIONS = 50
_UPDATE = threading.Lock()  # against the thread that saves checkpoints
_NO_CRASH = (EndStatus.FINISHED, EndStatus.STOPPED, EndStatus.REFUSED)


def read_generations(run: RunDirectory) -> list[dict[str, Any]]:
    """The valid rows; a damaged file must not prevent a run from starting."""
    return valid_rows(read_json(run.generations))


def start_seconds(recorded: Any) -> dict[str, float]:
    """Phase of a start -> seconds, of what is recorded; empty for a start that took no step, or a damaged record."""
    seconds = {short_text(phase): finite(value) for phase, value in dictionary(recorded).items()}
    return {phase: value for phase, value in seconds.items() if value is not None}


def valid_rows(rows: Any) -> list[dict[str, Any]]:
    """The rows with the numbers that every start has, of whatever generations.json contains."""
    if not isinstance(rows, list):
        return []
    return [row for row in rows if isinstance(row, dict) and _has_numbers(row)]


def _has_numbers(row: dict[str, Any]) -> bool:
    return all(isinstance(row.get(name), int) for name in ("generation", "from_step", "crashes"))


def begin_generation(
    run: RunDirectory,
    from_step: int,
    world_size: int,
    is_unattended: bool,
    to_step: int | None = None,
    threads: int | None = None,
) -> int:
    """Record a new start and return its number. The caller holds the lock of the run."""
    rows = read_generations(run)
    last = rows[-1] if rows else None
    launch = os.environ.get(LAUNCH)
    crashes = 0
    if last and is_unattended and last.get("launch") == launch:
        has_crashed = last.get("ended") not in _NO_CRASH
        has_progressed = from_step > last["from_step"]
        if has_crashed and not has_progressed:
            crashes = last["crashes"] + 1
    if crashes >= MAX_CRASHES:
        raise TrainingFailed(
            f"Run '{run.run_id}' crashed {crashes} times in a row without a newer checkpoint than step {from_step}.",
            remedy=f"See {run.shown(run.logs)} for the cause. Fix it, then run: llmtrain "
            + (f"resume {run.run_id}" if launch else f"train --resume {run.shown()}"),
            reason="gave_up",
        )
    generation = last["generation"] + 1 if last else 1
    row = {
        "generation": generation,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "architecture": cpu_architecture(),
        "threads": threads,
        "world_size": world_size,
        "from_step": from_step,
        "to_step": to_step,
        "crashes": crashes,
        "launch": launch,
        "invocation": invocation(),
        "saved": False,
        "ended": None,
    }
    write_json(run.generations, [*rows, row][-MAX_GENERATIONS:])
    return generation


def note_generation(run: RunDirectory, generation: int, **facts: Any) -> None:
    """Add facts to the record of a start."""
    with _UPDATE:
        rows = read_generations(run)
        for row in rows:
            if row["generation"] == generation:
                row.update(facts)
                write_json(run.generations, rows)


def has_saved(run: RunDirectory) -> bool | None:
    """Whether the run has published a checkpoint; None if that is not recorded."""
    rows = read_generations(run)
    if any(row.get("saved") or row["from_step"] > 0 for row in rows):
        return True
    return False if rows and all("saved" in row for row in rows) else None


def has_restored(run: RunDirectory) -> bool:
    """Whether an earlier start by the same command has loaded its checkpoint, so that the newest one is its own."""
    own = invocation()
    return any(row.get("invocation") == own and row.get("restored") for row in read_generations(run))


def invocation() -> str:
    """Identifies the elastic agent or command that started this process."""
    return f"{socket.gethostname()}-{os.getppid()}-{os.environ.get('TORCHELASTIC_RUN_ID', '')}"


def end_generation(run: RunDirectory, generation: int, status: EndStatus, step: int) -> None:
    """Record how a start ended; the first recorded status is kept."""
    with _UPDATE:
        rows = read_generations(run)
        for row in rows:
            if row["generation"] == generation and row.get("ended") is None:
                row.update(ended=status, step=step)
                try:
                    write_json(run.generations, rows)
                except OSError as problem:
                    if not is_full(problem):
                        raise
                    write_json_in_place(run.generations, rows)
