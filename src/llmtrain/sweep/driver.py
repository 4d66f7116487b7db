"""Runs a sweep to its end. All it knows is in the files of the sweep, so it may be killed at any point and started
again."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from llmtrain.config.document import dump_document
from llmtrain.core.files import write_atomic, write_json
from llmtrain.core.interrupts import stop_signals
from llmtrain.core.logs import log
from llmtrain.core.text import plural
from llmtrain.errors import CheckpointError, ExitCode, Interrupted, TrainingFailed, UsageError
from llmtrain.plan.cost import cost_of_run
from llmtrain.runs.lock import RunLock
from llmtrain.runs.view import RunView
from llmtrain.sweep.jobs import Job, missing_bracket, next_jobs
from llmtrain.sweep.optuna_search import propose
from llmtrain.sweep.outcome import diverged_at, read_outcome
from llmtrain.sweep.prepare import Sweep
from llmtrain.sweep.record import Outcome, root_option
from llmtrain.sweep.search import Point
from llmtrain.sweep.table import best_config, make_table, ordered_values
from llmtrain.sweep.trials import check_trials, number_trials
from llmtrain.sweep.workers import Workers

MAX_CRASHES = 10
"""Starts of a run without an outcome, after which the sweep ends with an error."""
WATCH_SECONDS = 5.0
"""How often the losses of running trials are read, to end one that has diverged."""


def drive(sweep: Sweep, workers: Workers, parallel: int) -> dict[str, Any]:
    """Train until the table is complete, and return it. Raises Interrupted after SIGTERM or Ctrl-C, when all runs have
    saved and ended."""
    with RunLock(sweep.directory.lock), _stop_flag() as is_stopped:
        driver = _Driver(sweep, workers, parallel, is_stopped)
        try:
            driver.train_all()
        except Interrupted as interrupted:
            interrupted.what = f"The sweep was interrupted. {workers.end_all()}."
            raise
        except BaseException:
            workers.end_all()
            raise
        return driver.finish()


class _Driver:
    def __init__(self, sweep: Sweep, workers: Workers, parallel: int, is_stopped: threading.Event) -> None:
        self._sweep = sweep
        self._workers = workers
        self._parallel = parallel
        self._is_stopped = is_stopped
        self._state = sweep.directory.read_state()
        self._usage = sweep.directory.read_usage()
        self._running: dict[str, Job] = {}
        self._crashes: dict[str, int] = {}
        self._watched_at = time.monotonic()

    @property
    def _done(self) -> int:
        return sum(len(rows) for rows in self._state.outcomes.values())

    def train_all(self) -> None:
        directory = self._sweep.directory
        log(
            "SWEEP",
            f"{self._done} of {plural(self._sweep.budget.starts, 'start')} done, up to {self._parallel} at a time; "
            f"how far they are: llmtrain sweep show {directory.name}{root_option(directory)}",
        )
        while True:
            if self._is_stopped.is_set():
                raise self._interrupted()
            self._propose()
            waiting = [job for job in next_jobs(self._sweep.budget, self._state) if job.run_id not in self._running]
            for job in waiting[: self._parallel - len(self._running)]:
                self._start(job)
            if not self._running:
                return
            for job in self._wait():
                del self._running[job.run_id]
                self._take(job)

    def finish(self) -> dict[str, Any]:
        """Write the table and the best config."""
        sweep = self._sweep
        table = make_table(sweep.directory.name, sweep.spec, sweep.budget, self._state)
        winner = table["winner"]
        if winner:
            text = best_config(self._state.trials[winner["trial"]], sweep.configs)
            write_atomic(sweep.directory.best, text)
        write_json(sweep.directory.table, table)
        return table

    def _propose(self) -> None:
        """Ask a search that learns for the trials of the next bracket."""
        numbers = missing_bracket(self._sweep.budget, self._state)
        if numbers is None:
            return
        sweep = self._sweep
        earlier = []
        for trial in self._state.trials:
            outcomes = self._state.outcomes.get(trial.run_id, [])
            if trial.same_as is None:  # with halving, the score at the last rung that it reached
                earlier.append(Point(trial.values, outcomes[-1].score if outcomes else None))
        drawn = propose(sweep.space, sweep.spec, earlier, len(numbers))
        trials = number_trials(sweep.directory.name, drawn, sweep.configs, self._state.trials)
        check_trials(sweep.spec, trials, sweep.configs)
        self._state.trials += trials
        sweep.directory.write_state(self._state)

    def _start(self, job: Job) -> None:
        directory = self._sweep.directory
        if job.rung and not directory.run(job.run_id).exists():
            raise CheckpointError(
                f"Trial {job.trial.number} is to train on, but its run was removed: {directory.run(job.run_id).path}.",
                remedy="Restore it from a backup, or start another sweep with --name.",
            )
        path = directory.config(job.run_id)
        if not path.is_file():
            seed = None
            if job.seed:
                seed = self._sweep.configs.build(job.trial.values, job.run_id).run.seed + job.seed
            config = self._sweep.configs.build(job.trial.values, job.run_id, seed)
            write_atomic(path, dump_document(config.as_dict()))
        self._workers.start(job, path)
        self._running[job.run_id] = job

    def _wait(self) -> list[Job]:
        """Until a run has ended, or a signal."""
        while not self._is_stopped.is_set():
            if ended := self._workers.ended():
                return ended
            if time.monotonic() - self._watched_at > WATCH_SECONDS:
                self._stop_diverged()
                self._watched_at = time.monotonic()
            time.sleep(self._workers.poll_seconds)
        return []

    def _stop_diverged(self) -> None:
        """End trials early whose outcome is known already."""
        for job in self._running.values():
            rows = RunView(self._sweep.directory.run(job.run_id)).rows
            if diverged_at(rows, job.steps) is not None:
                self._workers.stop(job)

    def _take(self, job: Job) -> None:
        """Record the outcome of a run that has ended; one without an outcome will be started again."""
        error = self._workers.error(job)
        run = self._sweep.directory.run(job.run_id)
        outcome = read_outcome(run, self._sweep.spec.metric, job.steps, error)
        if outcome is None:
            self._check_error(job, error)
            return
        self._state.outcomes.setdefault(job.run_id, []).append(outcome)
        self._sweep.directory.write_state(self._state)
        view = RunView(run)
        cost = cost_of_run(view)
        self._usage[job.run_id] = {"seconds": view.seconds, "cost": cost.as_dict() if cost else None}
        write_json(self._sweep.directory.usage, self._usage)
        self._log(job, outcome)

    def _check_error(self, job: Job, error: dict[str, Any]) -> None:
        """Raise the error of a run that would end with it again."""
        if error.get("exit_code") in (ExitCode.USAGE, ExitCode.FAILED):
            what = f"Trial {job.trial.number} (run '{job.run_id}') cannot be trained: {error.get('what')}"
            remedy = f"{error.get('remedy') or 'Fix it.'} Then continue: {self._resume_command}"
            if error["exit_code"] == ExitCode.USAGE:
                raise UsageError(what, remedy=remedy)
            raise TrainingFailed(what, remedy=remedy, reason=error.get("reason"))
        self._crashes[job.run_id] = self._crashes.get(job.run_id, 0) + 1
        if self._crashes[job.run_id] >= MAX_CRASHES:
            raise TrainingFailed(
                f"Trial {job.trial.number} (run '{job.run_id}') crashed {MAX_CRASHES} times. Its log: "
                f"{self._sweep.directory.log(job.run_id)}.",
                remedy=f"Find the cause with `llmtrain why {job.run_id}`, then continue: {self._resume_command}",
                reason="gave_up",
            )

    def _log(self, job: Job, outcome: Outcome) -> None:
        done = self._done
        what = f"{self._sweep.spec.metric} {outcome.score:.4f}" if outcome.score is not None else outcome.status
        if outcome.reason:
            what += f" ({outcome.reason})"
        seed = f", seed {self._sweep.base.run.seed + job.seed}" if job.seed else ""
        fields = ordered_values(job.trial, list(self._sweep.spec.space))
        values = ", ".join(f"{path} {value}" for path, value in fields.items()) or "the config"
        starts = self._sweep.budget.starts
        log(
            "SWEEP",
            f"trial {job.trial.number}{seed}: {what} at step {outcome.step} ({values}); {done} of {starts} done",
        )

    def _interrupted(self) -> Interrupted:
        return Interrupted("The sweep was interrupted.", remedy=f"Continue it: {self._resume_command}")

    @property
    def _resume_command(self) -> str:
        directory = self._sweep.directory
        return f"llmtrain sweep --resume {directory.name}{root_option(directory)}"


@contextmanager
def _stop_flag() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set, the first time; the second time they end the process."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = {number: signal.getsignal(number) for number in stop_signals()}

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        flag.set()
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    for number in before:
        signal.signal(number, stop)
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
