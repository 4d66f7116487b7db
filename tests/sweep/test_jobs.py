"""What is trained next depends on the outcomes only."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.sweep.halving import brackets_of, promoted, rungs_to, steps_of
from llmtrain.sweep.jobs import Budget, Job, finalists, next_jobs
from llmtrain.sweep.record import DIVERGED, FINISHED, Outcome, SweepState
from llmtrain.sweep.spec import SweepSpec
from llmtrain.sweep.table import best_first, make_table, winner
from llmtrain.sweep.trials import Trial

HALVING = Budget(27, (4, 12, 36), 9, 3, 1, 3)


def new_state(count: int) -> SweepState:
    return SweepState([Trial(number, f"t-{number}", {"trainer.lr": number}) for number in range(count)], {})


def outcome(job: Job, losses: list[float | None]) -> Outcome:
    loss = losses[job.trial.number]
    if loss is None:
        return Outcome(DIVERGED, 2, None, None, None, "loss not finite")
    # Closer together from rung to rung, so that the order of two trials may change.
    return Outcome(FINISHED, job.steps or 1, round(loss / (1 + job.rung) + job.seed / 100, 2), 10, f"{job.run_id}")


def train(budget: Budget, losses: list[float | None], parallel: int, seed: int) -> SweepState:
    """All jobs, on so many workers of random speeds."""
    workers = random.Random(seed)
    state = new_state(budget.trials)
    running: dict[str, Job] = {}
    while True:
        waiting = [job for job in next_jobs(budget, state) if job.run_id not in running]
        for job in waiting[: parallel - len(running)]:
            running[job.run_id] = job
        if not running:
            return state
        job = running.pop(workers.choice(sorted(running)))
        state.outcomes.setdefault(job.run_id, []).append(outcome(job, losses))


LOSSES = st.lists(st.one_of(st.none(), st.sampled_from([1.0, 1.5, 2.0, 3.0])), min_size=27, max_size=27)


@given(LOSSES, st.sampled_from([1, 3]), st.integers(0, 1000))
def test_table_does_not_depend_on_workers_and_arrival(losses: list[float | None], seeds: int, seed: int) -> None:
    budget = Budget(27, (4, 12, 36), 9, 3, seeds, 3)
    spec = SweepSpec(space={"trainer.lr": "log(1,2)"}, trials=27, seeds=seeds)
    tables = []
    for parallel in (1, 2, 4, 50):
        tables.append(make_table("t", spec, budget, train(budget, losses, parallel, seed)))
    assert tables[0]["is_complete"]
    assert all(table == tables[0] for table in tables)


def test_first_jobs_are_those_of_all_brackets_the_first_before() -> None:
    jobs = next_jobs(HALVING, new_state(27))
    assert [job.trial.number for job in jobs] == list(range(27))
    assert {job.steps for job in jobs} == {4}


def test_promotions_of_an_earlier_bracket_come_before_later_brackets() -> None:
    state = new_state(27)
    for number in range(9):
        state.outcomes[f"t-{number}"] = [Outcome(FINISHED, 4, float(number % 5), 1, "x")]
    jobs = next_jobs(HALVING, state)
    assert [(job.trial.number, job.rung) for job in jobs[:4]] == [(0, 1), (5, 1), (1, 1), (9, 0)]


def test_equal_losses_are_promoted_in_the_order_of_trials() -> None:
    assert promoted({7: 1.0, 3: 1.0, 5: 1.0, 1: 2.0}, 2) == [3, 5]


def test_diverged_trials_are_never_promoted() -> None:
    assert promoted({0: float("inf"), 1: float("inf"), 2: 9.0}, 1) == [2]
    assert promoted({0: float("inf")}, 3) == []


@pytest.mark.parametrize(
    ("steps", "first", "eta", "rungs"),
    [(81, 3, 3, [3, 9, 27, 81]), (220, 8, 3, [8, 24, 73, 220]), (10, 20, 3, [10]), (100, 25, 4, [25, 100])],
)
def test_rungs(steps: int, first: int, eta: int, rungs: list[int]) -> None:
    assert rungs_to(steps, first, eta) == rungs


def test_where_higher_is_better_the_highest_are_promoted_and_win() -> None:
    spec = SweepSpec(space={"trainer.lr": [1]}, trials=6, metric="tasks/grammar/acc", halving={"first_rung": 4})
    budget = Budget.of(spec, 6, [4, 12])
    assert budget.is_higher_better
    state = new_state(6)
    scores = [0.5, 0.9, 0.7, None, 0.9, 0.1]
    for trial, score in zip(state.trials, scores, strict=True):
        state.outcomes[trial.run_id] = [Outcome(FINISHED if score else DIVERGED, 4, score, 1, "x")]
    assert [job.trial.number for job in next_jobs(budget, state)] == [1, 4]
    for number, score in ((1, 0.6), (4, 0.8)):
        state.outcomes[f"t-{number}"].append(Outcome(FINISHED, 12, score, 1, "x"))
    assert [trial.number for trial in finalists(budget, state)] == [4, 1]
    table = make_table("t", spec, budget, state)
    assert table["winner"]["trial"] == 4
    assert [row["trial"] for row in best_first(table["rows"], is_higher_better=True)] == [4, 1, 2, 0, 5, 3]


def test_where_higher_is_better_the_highest_mean_wins() -> None:
    spec = SweepSpec(space={"trainer.lr": [1]}, trials=2, seeds=2, metric="val/accuracy")
    budget = Budget.of(spec, 2, [])
    state = new_state(2)
    for run_id, score in (("t-0", 0.5), ("t-0-s1", 0.9), ("t-1", 0.6), ("t-1-s1", 0.6)):
        state.outcomes[run_id] = [Outcome(FINISHED, 4, score, 1, run_id)]
    best: Any = make_table("t", spec, budget, state)["winner"]
    assert (best["trial"], best["seeds"]["mean"]) == (0, 0.7)


def test_brackets_and_steps() -> None:
    assert [list(each) for each in brackets_of(5, 3)] == [[0, 1, 2], [3, 4]]
    assert steps_of(range(9), [4, 12, 36], 3) == 9 * 4 + 3 * 8 + 1 * 24


def test_trials_with_equal_configs_are_trained_once() -> None:
    state = new_state(3)
    state.trials[2] = Trial(2, "t-2", {"trainer.lr": 0}, same_as=0)
    budget = Budget(3, (None,), 3, 1, 1, 3)
    assert [job.run_id for job in next_jobs(budget, state)] == ["t-0", "t-1"]
    for number in (0, 1):
        state.outcomes[f"t-{number}"] = [Outcome(FINISHED, 4, 1.0 + number, 1, "x")]
    table = make_table("t", SweepSpec(space={"trainer.lr": [1]}, trials=3), budget, state)
    assert table["is_complete"]
    assert [row["run_id"] for row in table["rows"]] == ["t-0", "t-1", "t-0"]
    assert [trial.number for trial in finalists(budget, state)] == [0, 1]


def test_best_is_decided_by_the_mean_over_seeds() -> None:
    budget = Budget(2, (None,), 2, 1, 3, 2)
    state = new_state(2)
    losses = {"t-0": [1.0, 1.5, 1.6], "t-1": [1.1, 1.12, 1.1]}
    for run_id, (first, *others) in losses.items():
        state.outcomes[run_id] = [Outcome(FINISHED, 4, first, 1, run_id)]
        for seed, loss in enumerate(others, 1):
            state.outcomes[f"{run_id}-s{seed}"] = [Outcome(FINISHED, 4, loss, 1, run_id)]
    table = make_table("t", SweepSpec(space={"trainer.lr": [1]}, trials=2, seeds=3), budget, state)
    best: Any = table["winner"]
    assert best["trial"] == 1
    assert best["not_distinguishable_from"] == [0]
    assert winner([], budget, SweepState([], {})) is None
