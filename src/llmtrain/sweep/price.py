"""What a sweep costs before it starts: steps, time, and money where prices are known. From the same estimates as
`llmtrain plan`, without torch."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from llmtrain.distributed.machine_limits import gpu_count, machine_memory
from llmtrain.plan.choose_target import choose_target
from llmtrain.plan.cost import estimate_cost, node_type_of
from llmtrain.plan.history import past_runs
from llmtrain.plan.plan import plan_by_formula
from llmtrain.plan.target import Target
from llmtrain.sweep.halving import steps_of
from llmtrain.sweep.jobs import Budget
from llmtrain.sweep.prepare import Sweep
from llmtrain.sweep.trials import Trial

MOST_PLANNED = 30
"""Trials whose time is estimated; the others are taken to be as long on average."""


@dataclass(frozen=True)
class Price:
    """At most: trials that diverge end early. None: not known."""

    trials: int
    starts: int
    """Processes that are started: of each trial one per rung, and one per seed."""
    steps: int | None
    all_steps: int | None
    """If every trial were trained to its end."""
    seconds: float | None
    """Of all trials, one after the other."""
    source: str
    cost: float | None
    currency: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def price_sweep(sweep: Sweep, trials: Sequence[Trial]) -> Price:
    """`trials`: those that are known, which may be the first bracket only."""
    budget = sweep.budget
    max_steps = None if sweep.base.trainer.max_epochs else sweep.base.trainer.steps
    steps = all_steps = None
    if max_steps is not None:
        steps = _steps(budget, max_steps)
        all_steps = budget.trials * max_steps
    per_step, source, target = _seconds_per_step(sweep, trials)
    seconds = per_step * steps if per_step is not None and steps is not None else None
    prices = sweep.base.plan.prices
    cost = estimate_cost(prices, target, seconds, node_type_of(sweep.base.launch.node_selector))
    return Price(budget.trials, budget.starts, steps, all_steps, seconds, source, cost.cost, cost.currency)


def _steps(budget: Budget, max_steps: int) -> int:
    rungs = [steps or max_steps for steps in budget.rungs]
    total = sum(steps_of(numbers, rungs, budget.eta) for numbers in budget.brackets)
    return total + budget.seed_runs * max_steps


def _seconds_per_step(sweep: Sweep, trials: Sequence[Trial]) -> tuple[float | None, str, Target]:
    """Mean over the trials, with evaluations and checkpoints; where it is from; and the machine."""
    target = _target(sweep)
    history = past_runs(str(sweep.directory.root))
    found = []
    source = "not known"
    for trial in trials[:MOST_PLANNED]:
        plan = plan_by_formula(sweep.configs.build(trial.values, trial.run_id), target, history)
        if plan.time and plan.time.total_seconds is not None and plan.time.steps:
            found.append(plan.time.total_seconds / plan.time.steps)
            source = f"{plan.time.source}, {plan.time.uncertainty_text}"
    return (fmean(found) if found else None), source, target


def _target(sweep: Sweep) -> Target:
    """One process of this machine, whose GPU is asked for its name only if there is one: that loads torch."""
    if sweep.is_launched or (sweep.base.run.device != "cpu" and gpu_count(os.environ)):
        return choose_target(sweep.base)
    return Target("cpu", machine_memory())
