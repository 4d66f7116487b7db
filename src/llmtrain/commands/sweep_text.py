"""The text that `llmtrain sweep` prints."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmtrain.commands.run_tables import loss_text, plain
from llmtrain.core.terminal import format_table
from llmtrain.core.text import plural
from llmtrain.plan.cost import money
from llmtrain.runs.progress_lines import duration_text
from llmtrain.sweep.prepare import Sweep
from llmtrain.sweep.price import Price
from llmtrain.sweep.table import best_first
from llmtrain.sweep.trials import Trial

Values = dict[str, Any]


def plan_text(sweep: Sweep, trials: Sequence[Trial], price: Price) -> str:
    """The trials of a sweep, and what it costs."""
    lines = []
    if trials:
        fields = list(sweep.spec.space)
        rows = [["trial", *fields]]
        for trial in trials:
            rows.append([str(trial.number), *(plain(trial.values.get(field)) for field in fields)])
        lines += [format_table(rows), ""]
    lines.append(f"sweep {sweep.directory.name}: {_budget_text(sweep, price)}")
    starts = plural(price.starts, "start")
    if price.seconds is not None:
        lines.append(f"time   {duration_text(price.seconds)} of training in all ({price.source})")
        lines.append(f"       and {starts} of a process, some seconds each")
    else:
        lines.append("time   not known")
    if price.cost is not None and price.currency is not None:
        lines.append(f"cost   {money(price.cost, price.currency)}")
    return "\n".join(lines)


def _budget_text(sweep: Sweep, price: Price) -> str:
    text = plural(price.trials, "trial")
    if sweep.spec.seeds > 1:
        finalists = min(sweep.spec.finalists, price.trials)
        text += f", {'' if price.trials == 1 else f'the best {finalists} '}with {sweep.spec.seeds} seeds"
    rungs = [str(steps) for steps in sweep.budget.rungs if steps is not None]
    if rungs:
        text += f", rungs at {', '.join(rungs)} steps"
    if price.steps is not None and price.all_steps:
        text += f", {plural(price.steps, 'step')} in all"
        if price.steps < price.all_steps:
            text += f" ({price.steps / price.all_steps:.2f} of training every trial to its end)"
    return text


def table_text(value: Values) -> str:
    """`sweep show`: a row per trial, and which is best."""
    fields = value["fields"]
    has_cost = any(row["cost"] for row in value["rows"])
    has_seeds = any(row["seeds"] for row in value["rows"])
    head = ["trial", *fields, "status", "step", value["metric"]]
    head += ["mean"] * has_seeds + ["tokens", "time"] + ["cost"] * has_cost + ["run"]
    table = [head]
    for row in best_first(value["rows"], value["is_higher_better"]):
        cells = [str(row["trial"])]
        cells += [plain(row["values"].get(field)) for field in fields]
        cells += [_status(row), str(row["step"]), loss_text(row["score"])]
        if has_seeds:
            cells.append(mean_text(row["seeds"]))
        cells.append("-" if row["tokens"] is None else f"{row['tokens']:,}")
        cells.append("-" if row["seconds"] is None else duration_text(row["seconds"]))
        if has_cost:
            cells.append(money(row["cost"]["cost"], row["cost"]["currency"]) if row["cost"] else "-")
        cells.append(row["run_id"])
        table.append(cells)
    lines = [format_table(table, dropped_first=["run", "tokens", "time", "cost"]), ""]
    return "\n".join([*lines, *_ending(value)])


def _status(row: Values) -> str:
    return f"{row['status']} ({row['reason']})" if row["reason"] else str(row["status"])


def mean_text(seeds: Values | None) -> str:
    """`2.8502 ± 0.0131`, mean and standard error."""
    if not seeds or seeds["mean"] is None:
        return "-"
    error = seeds["standard_error"]
    text = loss_text(seeds["mean"])
    return text if error is None else f"{text} ± {loss_text(error)}"


def _ending(value: Values) -> list[str]:
    done = sum(row["status"] != "waiting" for row in value["rows"])
    winner = value["winner"]
    if not value["is_complete"]:
        state = "running" if value["is_running"] else "interrupted"
        lines = [f"{state}: {done} of {plural(value['trials'], 'trial')} ended, {value['running']} running"]
        if not value["is_running"]:
            lines.append(f"continue  llmtrain sweep --resume {value['name']}{value['root_option']}")
        return lines
    if winner is None:
        return ["Every trial diverged or failed. Lower the learning rates, or see the logs of the trials."]
    values = ", ".join(f"{path} {plain(item)}" for path, item in winner["values"].items())
    seeds = winner["seeds"]
    found = f"{value['metric']} {loss_text(winner['score'])}"
    if seeds:
        found = f"{value['metric']} {mean_text(seeds)} (mean and standard error of {seeds['n']} seeds"
        found += f", standard deviation {loss_text(seeds['standard_deviation'])})"
    lines = [f"Best: trial {winner['trial']}, {values}: {found}."]
    if not values and seeds:  # one config
        lines = [f"The config: {found}.", f"Each seed: {', '.join(loss_text(score) for score in seeds['scores'])}."]
    close = [str(number) for number in winner["not_distinguishable_from"]]
    if close:
        noun = "trial" if len(close) == 1 else "trials"
        lines.append(f"Not distinguishable from {noun} {', '.join(close)} (Welch's t-test, 5 %).")
    for each in winner["at_edge"]:
        lines.append(
            f"{each['field']} {plain(each['value'])} is near the {each['end']} end of {each['range']}: "
            "a wider range may have a better value."
        )
    option = value["root_option"]
    lines += [
        "",
        f"use it      llmtrain generate {winner['run_id']}{option}",
        f"its config  llmtrain sweep show {value['name']} --best{option}",
        f"train it    llmtrain train --config {shlex.quote(str(Path(value['path']) / 'best.yaml'))}",
        f"state       sha256 {str(winner['state_sha256'])[:16]}...",
    ]
    return lines
