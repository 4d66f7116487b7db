"""What a sweep has to train next: a function of its outcomes. It does not know the workers, nor which trial finished
first, so a sweep ends with the same table on any number of them, and after any interruption."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain.sweep.halving import WORST, brackets_of, kept_of, promoted, rank_of
from llmtrain.sweep.record import SweepState
from llmtrain.sweep.spec import OPTUNA, OPTUNA_BATCH, SweepSpec
from llmtrain.sweep.trials import Trial


@dataclass(frozen=True)
class Job:
    """A run to be trained to a rung."""

    trial: Trial
    run_id: str
    rung: int
    """Its number, from 0."""
    steps: int | None
    """trainer.max_steps until there; None: what the config says."""
    seed: int = 0
    """Added to run.seed."""


@dataclass(frozen=True)
class Budget:
    """The rungs and brackets of a sweep."""

    trials: int
    rungs: tuple[int | None, ...]
    """Steps; one rung without a number: every trial trains as long as its config says."""
    size: int
    """Trials of a bracket."""
    eta: int
    seeds: int
    finalists: int
    is_higher_better: bool = False
    """Of the metric."""

    @classmethod
    def of(cls, spec: SweepSpec, trials: int, rungs: Sequence[int]) -> "Budget":
        """`rungs`: empty without halving."""
        size = OPTUNA_BATCH if spec.search == OPTUNA else trials
        eta = 1
        if rungs and spec.halving:
            eta = spec.halving.eta
            if spec.search == OPTUNA:
                size = eta ** (len(rungs) - 1)
            size = spec.halving.bracket or size
        return cls(
            trials, tuple(rungs) or (None,), min(size, trials), eta, spec.seeds, spec.finalists, spec.is_higher_better
        )

    @property
    def brackets(self) -> list[range]:
        return brackets_of(self.trials, self.size)

    @property
    def starts(self) -> int:
        """Processes that are started, if no trial diverges: of each trial one per rung, and one per seed."""
        total = 0
        for numbers in self.brackets:
            size = len(numbers)
            for _ in self.rungs:
                total += size
                size = kept_of(size, self.eta)
        return total + self.seed_runs

    @property
    def seed_runs(self) -> int:
        """Runs with other seeds, if no trial diverges."""
        reached = 0
        for numbers in self.brackets:
            kept = len(numbers)
            for _ in self.rungs[1:]:
                kept = kept_of(kept, self.eta)
            reached += kept
        return min(self.finalists, reached) * (self.seeds - 1)


def next_jobs(budget: Budget, state: SweepState) -> list[Job]:
    """All runs that can be trained now, the most urgent first: a bracket that began earlier, then a higher rung."""
    jobs: list[Job] = []
    for numbers in budget.brackets:
        jobs += bracket_jobs(budget, state, numbers)
    if budget.seeds > 1 and (not jobs or budget.trials == 1):
        jobs += _seed_jobs(budget, state)
    return jobs


def missing_bracket(budget: Budget, state: SweepState) -> range | None:
    """The trials that a search that learns from results has to propose now: those of the next bracket, once all earlier
    ones are complete."""
    if len(state.trials) >= budget.trials or next_jobs(budget, state):
        return None
    return next(numbers for numbers in budget.brackets if numbers.start >= len(state.trials))


def bracket_jobs(budget: Budget, state: SweepState, numbers: Sequence[int]) -> list[Job]:
    """The runs that the current rung of a bracket lacks; none if the bracket is complete."""
    members = [state.trials[number] for number in numbers if number < len(state.trials)]
    members = [trial for trial in members if trial.same_as is None]
    for rung, steps in enumerate(budget.rungs):
        missing = [trial for trial in members if state.outcome(trial.run_id, rung) is None]
        if missing:
            return [Job(trial, trial.run_id, rung, steps) for trial in missing]
        if rung + 1 < len(budget.rungs):
            ranks = {trial.number: rank_at(budget, state, trial.run_id, rung) for trial in members}
            members = [state.trials[number] for number in promoted(ranks, budget.eta)]
    return []


def rank_at(budget: Budget, state: SweepState, run_id: str, rung: int) -> float:
    """What is compared; the lower the better."""
    outcome = state.outcome(run_id, rung)
    return rank_of(outcome.score if outcome else None, budget.is_higher_better)


def finalists(budget: Budget, state: SweepState) -> list[Trial]:
    """The best of the trials that were trained to the last rung."""
    last = len(budget.rungs) - 1
    ranking = []
    for trial in state.trials:
        rank = rank_at(budget, state, trial.run_id, last)
        if rank < WORST:
            ranking.append((rank, trial.number))
    return [state.trials[number] for _, number in sorted(ranking)[: budget.finalists]]


def seed_run_id(trial: Trial, seed: int) -> str:
    return f"{trial.run_id}-s{seed}"


def _seed_jobs(budget: Budget, state: SweepState) -> list[Job]:
    """The finalists with other seeds. A single trial is a finalist before it has ended."""
    steps = budget.rungs[-1]
    jobs = []
    for trial in state.trials if budget.trials == 1 else finalists(budget, state):
        for seed in range(1, budget.seeds):
            run_id = seed_run_id(trial, seed)
            if state.outcome(run_id, 0) is None:
                jobs.append(Job(trial, run_id, 0, steps, seed))
    return jobs
