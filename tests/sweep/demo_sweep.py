"""The files of a sweep without any training: for the page, reports and long tables."""

from pathlib import Path
from typing import Any

from llmtrain.sweep.jobs import Budget, next_jobs
from llmtrain.sweep.record import DIVERGED, FINISHED, Outcome, SweepDirectory, SweepState
from llmtrain.sweep.search import draw
from llmtrain.sweep.space import read_space
from llmtrain.sweep.spec import SweepSpec, dump_spec
from llmtrain.sweep.trials import Trial

SPACE = {"trainer.lr": "log(1e-4,1e-2)", "model.n_layers": [2, 4], "trainer.optimizer": "[adamw,muon]"}
RUNGS = [10, 30, 90]


def write_sweep(
    root: Path, name: str = "demo", trials: int = 9, jobs: int | None = None, metric: str = "val/loss"
) -> SweepDirectory:
    """A sweep with three rungs. `jobs`: how many of them have ended; None: all."""
    spec = SweepSpec(name=name, space=SPACE, trials=trials, halving={"first_rung": 10}, metric=metric)
    drawn = draw(read_space(SPACE, []), "halton", 0, trials)
    state = SweepState([Trial(number, f"{name}-{number}", values) for number, values in enumerate(drawn)], {})
    budget = Budget.of(spec, trials, RUNGS)
    sweep = SweepDirectory(root / name)
    recorded: dict[str, Any] = {"created_at": "2026-11-19T00:00:00Z", "spec": dump_spec(spec)}
    recorded |= {"config": None, "threads": 1, "is_launched": False}
    sweep.create({**recorded, "trials": trials, "rungs": RUNGS}, {}, state.trials)
    done = 0
    while (waiting := next_jobs(budget, state)) and done != jobs:
        job = waiting[0]
        loss = 3.0 - job.rung / 2 + job.trial.number % 7 / 10
        outcome = Outcome(FINISHED, job.steps or 0, loss, 1000, "ab" * 32)
        if job.trial.number == 5:
            outcome = Outcome(DIVERGED, 4, None, None, None, "loss not finite")
        state.outcomes.setdefault(job.run_id, []).append(outcome)
        done += 1
    sweep.write_state(state)
    return sweep
