"""A sweep as `sweep show`, the page and the report show it: its table, with what is running now, and what it cost."""

from collections.abc import Mapping
from typing import Any

from llmtrain.errors import UsageError
from llmtrain.runs.lock import is_held
from llmtrain.runs.view import RunView
from llmtrain.sweep.jobs import Budget
from llmtrain.sweep.record import SweepDirectory, root_option
from llmtrain.sweep.space import Choice, Values, read_space
from llmtrain.sweep.spec import load_spec
from llmtrain.sweep.table import WAITING, make_table

RUNNING = "running"
EDGE = 0.05
"""Share of a range that is near its end."""


def describe(directory: SweepDirectory) -> dict[str, Any]:
    """The table, with `seconds`, `cost` and the state of each trial."""
    recorded = directory.read_spec()
    spec = load_spec(recorded["spec"])
    budget = Budget.of(spec, recorded["trials"], recorded["rungs"])
    table = make_table(directory.name, spec, budget, directory.read_state())
    usage = directory.read_usage()
    is_running = is_held(directory.lock)
    running = 0
    for row in table["rows"]:
        spent = usage.get(row["run_id"], {})
        row["seconds"] = spent.get("seconds")
        row["cost"] = spent.get("cost")
        run = directory.run(row["run_id"])
        if row["status"] == WAITING and is_held(run.lock):
            row["status"] = RUNNING
            row["step"] = RunView(run).step
            running += 1
    if table["winner"]:
        table["winner"]["at_edge"] = at_edge(spec.space, table["winner"]["values"])
    return {
        **table,
        "path": str(directory.path),
        "created_at": recorded["created_at"],
        "is_running": is_running,
        "running": running,
        "root_option": root_option(directory),
    }


def at_edge(space: Mapping[str, Any], values: Values) -> list[dict[str, Any]]:
    """The fields whose best value is near an end of their range, beyond which it may be better still."""
    found = []
    for each in read_space(space, []).fields:
        if each.path not in values or isinstance(each.range, Choice):
            continue
        value = values[each.path]
        if value <= each.range.at(EDGE):
            end = "lower"
        elif value >= each.range.at(1 - EDGE):
            end = "upper"
        else:
            continue
        found.append({"field": each.path, "value": value, "end": end, "range": _range_text(space[each.path])})
    return found


def _range_text(written: Any) -> str:
    """A range as the user wrote it, without its conditions."""
    return str(written["values"] if isinstance(written, Mapping) else written)


def read_best(directory: SweepDirectory) -> str:
    """The config of the best trial as YAML."""
    try:
        return directory.best.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"Sweep '{directory.name}' has no best trial yet.",
            remedy=f"`llmtrain sweep show {directory.name}` shows how far it is.",
        ) from None
