"""Trials as runs on a Kubernetes cluster, each in the user's queue (`llmtrain sweep --launch`).

A promotion is what a user would do by hand: `llmtrain resume RUN --set trainer.max_steps=N`. The driver runs on the
user's machine and may end at any time: the runs train on, and the next driver finds them by their names. What a trial
has reached is read from its metrics, which are fetched when it has ended.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmtrain.config.load import load_config
from llmtrain.core.arguments import ClusterPlace
from llmtrain.core.logs import warn
from llmtrain.core.text import first_names
from llmtrain.errors import ClusterError, ConfigError, LlmtrainError, UsageError
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch.code_bundle import CodeBundle
from llmtrain.launch.job import config_map_name
from llmtrain.launch.plan_job import plan_job
from llmtrain.launch.plugin_code import check_code
from llmtrain.launch.pod_memory import memory_warnings
from llmtrain.operate.cluster_run import ClusterRun
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.start import plan_warnings, start_run
from llmtrain.operate.status.container_exits import exit_histories
from llmtrain.runs.state import RunState
from llmtrain.sweep.jobs import Job
from llmtrain.sweep.prepare import Sweep
from llmtrain.sweep.record import SweepDirectory
from llmtrain.sweep.trials import Trial, TrialConfigs

POLL_SECONDS = 5.0
MOST_AWAY_SECONDS = 600.0
"""How long the API server may be unreachable before the driver ends; the runs train on."""


class ClusterWorkers:
    poll_seconds = POLL_SECONDS

    def __init__(self, sweep: SweepDirectory, place: ClusterPlace, code: CodeBundle | None) -> None:
        self._sweep = sweep
        self._cluster = Cluster.connect(place.kubeconfig, place.context)
        self._code = code
        self._warnings: set[str] = set()
        self._started: dict[str, Job] = {}
        self._errors: dict[str, dict[str, Any]] = {}
        self._away_since: float | None = None

    def start(self, job: Job, config: Path) -> None:
        run = self._find(job, config)
        if run is None:
            self._submit(job, config)
        elif run.status(with_log=False, with_usage=False).has_ended and not _is_complete(run, job):
            run.resume([] if job.steps is None else [f"trainer.max_steps={job.steps}"])
        self._started[job.run_id] = job

    def ended(self) -> list[Job]:
        found: list[Job] = []
        for job in list(self._started.values()):
            try:
                has_ended = self._has_ended(job)
                self._away_since = None
            except ClusterError as problem:
                self._check_away(problem)
                return found
            if has_ended:
                del self._started[job.run_id]
                found.append(job)
        return found

    def error(self, job: Job) -> dict[str, Any]:
        return self._errors.pop(job.run_id, {})

    def stop(self, job: Job) -> None:
        self._handle(job).stop()

    def end_all(self) -> str:
        return "Its runs train on in the cluster"

    def _find(self, job: Job, config: Path) -> ClusterRun | None:
        namespace = self._namespace_of(config)
        if self._cluster.get("v1", "ConfigMap", config_map_name(job.run_id), namespace) is None:
            return None
        return ClusterRun.find(self._cluster, job.run_id, namespace)

    def _handle(self, job: Job) -> ClusterRun:
        namespace = self._namespace_of(self._sweep.config(job.run_id))
        return ClusterRun.find(self._cluster, job.run_id, namespace)

    def _namespace_of(self, config: Path) -> str:
        return load_config(config, for_launch=True).launch.namespace or self._cluster.namespace

    def _submit(self, job: Job, config: Path) -> None:
        overrides = [] if job.steps is None else [f"trainer.max_steps={job.steps}"]
        loaded = load_config(config, overrides, for_launch=True)
        loaded = loaded.with_values("launch", namespace=self._namespace_of(config))
        plan = plan_job(loaded, nonce=os.urandom(3).hex(), code=self._code)
        for warning in (*plan_warnings(plan, self._cluster.name), *memory_warnings(plan)):
            if warning not in self._warnings:  # mostly the same ones for all trials
                self._warnings.add(warning)
                warn("SWEEP", warning)
        start_run(self._cluster, plan, resume=False)

    def _has_ended(self, job: Job) -> bool:
        """Whether the run has ended; its metrics are here then."""
        run = self._handle(job)
        status = run.status(with_log=False, with_usage=False)
        if not status.has_ended:
            return False
        try:
            run.fetch(self._sweep.root, only="metrics")
        except ClusterError:
            raise
        except LlmtrainError:
            if status.state in (RunState.FINISHED, RunState.FAILED):
                raise  # in other states it may have ended before it wrote a file, and is launched again
        if status.state == RunState.FAILED:
            self._errors[job.run_id] = _error(run.look(with_log=False, with_usage=False), status.exit_code)
        return True

    def _check_away(self, problem: ClusterError) -> None:
        """Raise if the API server has been away for long."""
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            warn("SWEEP", f"{problem.what} Trying again; the runs train on.")
        if now - self._away_since > MOST_AWAY_SECONDS:
            raise problem


def check_launch(
    trials: Sequence[Trial], configs: TrialConfigs, code: CodeBundle | None, with_code: str | None
) -> list[str]:
    """Refuse trials that cannot be launched, with all problems at once. Asks no cluster. Returns warnings. `code`: the
    files of the directory `with_code`, whose classes are imported here."""
    problems: dict[str, None] = {}
    warnings: dict[str, None] = {}
    for trial in trials:
        config = configs.build(trial.values, trial.run_id)
        try:
            warnings |= dict.fromkeys(check_code(config, "the config", code, with_code))
            plan_job(config, code=code)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
        except LlmtrainError as error:
            problems[error.what_and_known] = None
    if problems:
        raise ConfigError("the sweep", list(problems))
    return list(warnings)


def check_names(sweep: Sweep, trials: Sequence[Trial], place: ClusterPlace) -> None:
    """Refuse a new sweep whose trials have the names of runs of the cluster, of another user perhaps: the driver would
    take them for its own."""
    cluster = Cluster.connect(place.kubeconfig, place.context)
    namespace = sweep.base.launch.namespace or cluster.namespace
    taken = []
    for trial in trials:
        if cluster.get("v1", "ConfigMap", config_map_name(trial.run_id), namespace) is not None:
            taken.append(trial.run_id)
    if taken:
        raise UsageError(
            f"The trials of a sweep '{sweep.directory.name}' would be runs that exist already in namespace "
            f"'{namespace}': {first_names(taken)}.",
            remedy="Choose another --name.",
        )


def _is_complete(run: ClusterRun, job: Job) -> bool:
    """Whether a run that has ended was launched for these steps and has finished."""
    if run.status(with_log=False, with_usage=False).state != RunState.FINISHED:
        return False
    return job.steps is None or (run.record.config.trainer.max_steps or 0) >= job.steps


def _error(observed: ObservedRun, code: int | None) -> dict[str, Any]:
    """What the processes of a failed run reported, as LlmtrainError.as_dict."""
    with observed.checked_objects():
        for history in exit_histories(observed.record, observed.pods_by_index):
            for found in history:
                report = found.report
                if report is not None and report.error:
                    return {
                        "error": report.error,
                        "what": report.message,
                        "remedy": report.remedy,
                        "reason": report.reason,
                        "exit_code": found.code,
                    }
    return {"error": "", "what": "its pods left no report", "exit_code": code}
