"""The table of a sweep: what was tried, how it ended, and which trial is best. A function of the recorded outcomes, in
which times and workers do not occur."""

from collections.abc import Sequence
from typing import Any

from llmtrain.config.document import dump_document
from llmtrain.core.redact import redact_values
from llmtrain.runs.groups import is_distinguishable, sample_statistics
from llmtrain.sweep.halving import rank_of
from llmtrain.sweep.jobs import Budget, finalists, next_jobs, seed_run_id
from llmtrain.sweep.record import FINISHED, Outcome, SweepState
from llmtrain.sweep.spec import SweepSpec
from llmtrain.sweep.trials import Trial, TrialConfigs

Row = dict[str, Any]
WAITING = "waiting"
STOPPED = "stopped"
"""Not promoted: other trials were better at its last rung."""
FINAL = "finished"
EQUAL = "equal"
"""Not trained: its config is that of an earlier trial."""


def make_table(name: str, spec: SweepSpec, budget: Budget, state: SweepState) -> dict[str, Any]:
    """Rows in order of trial number, and the winner. Equal for equal sweeps, bit for bit."""
    rows = [_row(trial, list(spec.space), budget, state) for trial in state.trials]
    is_complete = len(state.trials) == budget.trials and not next_jobs(budget, state)
    if is_complete:
        for row in rows:
            row["status"] = STOPPED if row["status"] == WAITING else row["status"]
    return {
        "name": name,
        "metric": spec.metric,
        "is_higher_better": budget.is_higher_better,
        "fields": list(spec.space),
        "rungs": [steps for steps in budget.rungs if steps is not None],
        "trials": budget.trials,
        "is_complete": is_complete,
        "rows": rows,
        "winner": winner(rows, budget, state) if is_complete else None,
    }


def winner(rows: Sequence[Row], budget: Budget, state: SweepState) -> Row | None:
    """The best finalist: by the mean over its seeds if there are several, else by its score. None if every trial
    diverged or failed."""
    candidates = [rows[trial.number] for trial in finalists(budget, state)]
    if not candidates:
        return None
    ranked = sorted(candidates, key=lambda row: _rank(row, budget.is_higher_better))
    best = ranked[0]
    close = []
    for row in ranked[1:]:
        if best["seeds"] and row["seeds"] and is_distinguishable(best["seeds"], row["seeds"]) is False:
            close.append(row["trial"])
    return {
        "trial": best["trial"],
        "run_id": best["run_id"],
        "values": best["values"],
        "score": best["score"],
        "state_sha256": best["state_sha256"],
        "seeds": best["seeds"],
        "not_distinguishable_from": close,
    }


def best_first(rows: Sequence[Row], is_higher_better: bool) -> list[Row]:
    """Rows for people: those that trained longest, by their score; then those without one."""
    return sorted(
        rows,
        key=lambda row: (
            row["score"] is None,
            -row["step"],
            rank_of(row["score"], is_higher_better),
            row["trial"],
        ),
    )


def best_config(trial: Trial, configs: TrialConfigs) -> str:
    """The config of a trial as YAML, ready to train: without a run id."""
    config = configs.build(trial.values, trial.run_id)
    config = config.with_values("output", run_id=None)
    return dump_document(redact_values(config.as_dict()))


def ordered_values(trial: Trial, fields: Sequence[str]) -> dict[str, Any]:
    """The values of a trial in the order of the space; those of a file are sorted."""
    return {path: trial.values[path] for path in fields if path in trial.values}


def _row(trial: Trial, fields: Sequence[str], budget: Budget, state: SweepState) -> Row:
    run_id = trial.run_id
    if trial.same_as is not None:
        run_id = state.trials[trial.same_as].run_id
    outcomes = state.outcomes.get(run_id, [])
    last = outcomes[-1] if outcomes else None
    return {
        "trial": trial.number,
        "run_id": run_id,
        "bracket": trial.number // budget.size,
        "values": ordered_values(trial, fields),
        "status": _status(trial, last, len(outcomes) == len(budget.rungs)),
        "reason": last.reason if last else None,
        "step": last.step if last else 0,
        "score": last.score if last else None,
        "scores": [outcome.score for outcome in outcomes],
        "tokens": last.tokens if last else None,
        "state_sha256": last.state_sha256 if last else None,
        "seeds": _seed_statistics(trial, outcomes, budget, state),
    }


def _status(trial: Trial, last: Outcome | None, is_last_rung: bool) -> str:
    if trial.same_as is not None:
        return EQUAL
    if last is None:
        return WAITING
    if last.status != FINISHED:
        return last.status
    return FINAL if is_last_rung else WAITING


def _seed_statistics(trial: Trial, outcomes: Sequence[Outcome], budget: Budget, state: SweepState) -> Row | None:
    """Mean and standard error over the seeds of a finalist; None if it has one seed only."""
    found = []
    for seed in range(1, budget.seeds):
        outcome = state.outcome(seed_run_id(trial, seed), 0)
        if outcome:
            found.append(outcome)
    if not found or not outcomes:
        return None
    scores = [outcome.score for outcome in (outcomes[-1], *found)]
    known = [score for score in scores if score is not None]
    return {**sample_statistics(known), "diverged": len(scores) - len(known), "scores": scores}


def _rank(row: Row, is_higher_better: bool) -> tuple[int, float, int]:
    """A finalist that diverges with some seed is behind those that do not."""
    seeds = row["seeds"]
    if not seeds:
        return (0, rank_of(row["score"], is_higher_better), row["trial"])
    return (seeds["diverged"], rank_of(seeds["mean"], is_higher_better), row["trial"])
