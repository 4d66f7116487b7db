"""Sweeps on the page and in a report: the table of `sweep show`, with the keys of its runs."""

from contextlib import suppress
from pathlib import Path

from llmtrain.errors import LlmtrainError
from llmtrain.page.local_runs import LOCAL
from llmtrain.page.run_catalog import NotFound
from llmtrain.page.run_values import Values
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.lock import is_held
from llmtrain.sweep.record import SweepDirectory, list_sweeps
from llmtrain.sweep.show import describe
from llmtrain.sweep.table import EQUAL, best_first

MAX_REPORTED = 8


def sweep_list(root: str) -> list[Values]:
    """The sweeps of a directory: name, and how far each is."""
    found = []
    for sweep in list_sweeps(root):
        with suppress(LlmtrainError):  # damaged: `sweep show` names the file
            ended = len(sweep.read_state().outcomes)
            found.append({"name": sweep.name, "is_running": is_held(sweep.lock), "runs": ended})
    return found


def sweep_details(root: str, name: str) -> Values:
    """Everything that the page shows of a sweep. By name only: a viewer must not choose a directory."""
    for sweep in list_sweeps(root):
        if sweep.name == name:
            return sweep_values(sweep)
    raise NotFound(f"There is no sweep '{name}' here (any more).")


def best_runs(sweep: Values, root: str) -> list[RunDirectory]:
    """The runs of the best trials, as many as a report of a sweep shows."""
    rows = [row for row in sweep["rows"] if row["score"] is not None and row["has_files"] and row["status"] != EQUAL]
    rows = best_first(rows, sweep["is_higher_better"])
    return [RunDirectory(Path(root).expanduser() / row["run_id"]) for row in rows[:MAX_REPORTED]]


def sweep_values(sweep: SweepDirectory) -> Values:
    table = describe(sweep)
    for row in table["rows"]:
        row["key"] = f"{LOCAL}/{row['run_id']}"
        row["has_files"] = sweep.run(row["run_id"]).exists()
    del table["path"]
    return table
