"""A worker for tests of sweeps: it trains for real, but in this process, which starts no other."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmtrain.config.load import load_config
from llmtrain.errors import LlmtrainError
from llmtrain.sweep.jobs import Job
from llmtrain.sweep.prepare import Sweep

MakeSweep = Callable[..., Sweep]


class InThisProcess:
    """Trains a run when it is started. `ended` returns them in a random order, as many workers would."""

    poll_seconds = 0.0

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._started: list[Job] = []
        self._errors: dict[str, dict[str, Any]] = {}
        self.trained: list[tuple[str, int]] = []
        """(run id, rung)"""
        self.on_start: Callable[[Job], None] = lambda _: None

    def start(self, job: Job, config: Path) -> None:
        from llmtrain.training.run import run_training

        self.on_start(job)
        self.trained.append((job.run_id, job.rung))
        overrides = [] if job.steps is None else [f"trainer.max_steps={job.steps}"]
        try:
            run_training(load_config(config, overrides), "auto", progress="none")
        except LlmtrainError as error:
            self._errors[job.run_id] = error.as_dict()
        self._started.append(job)

    def ended(self) -> list[Job]:
        self._random.shuffle(self._started)
        count = self._random.randint(1, len(self._started)) if self._started else 0
        found, self._started = self._started[:count], self._started[count:]
        return found

    def error(self, job: Job) -> dict[str, Any]:
        return self._errors.pop(job.run_id, {})

    def stop(self, job: Job) -> None:
        pass

    def end_all(self) -> str:
        return ""
