"""Trials as processes of this machine: `llmtrain train`, one per run.

A process outlives a driver that is killed, and the next driver must not start a second one beside it. Each holds a lock
on its log file, which it inherited (flock): it is released when the process ends, however it ends.
"""

import fcntl
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.config.run import RunSection
from llmtrain.core.files import read_json
from llmtrain.core.logs import warn
from llmtrain.core.text import plural
from llmtrain.distributed.machine_limits import gpu_count, usable_cores
from llmtrain.distributed.workers import worker_command
from llmtrain.errors import ExitCode
from llmtrain.runs.json_values import dictionary
from llmtrain.runs.lock import owner_pid
from llmtrain.sweep.jobs import Job
from llmtrain.sweep.outcome import GPU_MEMORY
from llmtrain.sweep.record import SweepDirectory

POLL_SECONDS = 0.02


@dataclass
class _Started:
    job: Job
    slot: int
    process: subprocess.Popen[bytes] | None
    """None: started by an earlier driver."""


class LocalWorkers:
    poll_seconds = POLL_SECONDS

    def __init__(self, sweep: SweepDirectory, device: str, search_path: str) -> None:
        """`device`: run.device; on GPUs each run gets one of them. `search_path`: directory of plugins."""
        self._sweep = sweep
        self._gpus = [] if device == "cpu" else _visible_gpus()
        self._search_path = search_path
        self._started: dict[str, _Started] = {}
        self._shares_gpus = False

    def start(self, job: Job, config: Path) -> None:
        slot = self._free_slot()
        self._shares_gpus |= 0 < len(self._gpus) <= slot
        log = os.open(self._sweep.log(job.run_id), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            if not _lock(log):
                self._started[job.run_id] = _Started(job, slot, None)
                return
            with self._sweep.printed(job.run_id).open("wb") as printed:
                process = subprocess.Popen(
                    _command(job, config),
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=log,
                    env=self._environment(slot),
                    start_new_session=True,  # Ctrl-C is for the driver, which then stops all
                )
            self._started[job.run_id] = _Started(job, slot, process)
        finally:
            os.close(log)

    def ended(self) -> list[Job]:
        found = [each.job for each in self._started.values() if self._has_ended(each)]
        for job in found:
            del self._started[job.run_id]
        return found

    def error(self, job: Job) -> dict[str, Any]:
        values = dictionary(read_json(self._sweep.printed(job.run_id)))
        if self._shares_gpus and values.get("reason") == GPU_MEMORY:
            # Alone it might fit: no outcome, which must not depend on what else is trained.
            return {
                "what": "its GPU, which it shares with other trials, has too little memory.",
                "remedy": f"Lower --parallel: this machine has {plural(len(self._gpus), 'GPU')}.",
                "exit_code": ExitCode.FAILED,
            }
        return values if "error" in values else {}

    def stop(self, job: Job) -> None:
        started = self._started.get(job.run_id)
        if started is None:
            return
        pid = started.process.pid if started.process else owner_pid(self._sweep.run(job.run_id).lock)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def end_all(self) -> str:
        for each in list(self._started.values()):
            self.stop(each.job)
        while self._started:
            self.ended()
            time.sleep(POLL_SECONDS)
        return "Its trials have saved"

    def _has_ended(self, started: _Started) -> bool:
        if started.process:
            return started.process.poll() is not None
        log = os.open(self._sweep.log(started.job.run_id), os.O_RDONLY)
        try:
            return _lock(log)
        finally:
            os.close(log)

    def _free_slot(self) -> int:
        taken = {each.slot for each in self._started.values()}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def _environment(self, slot: int) -> dict[str, str]:
        environment = dict(os.environ)
        paths = [self._search_path, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[slot % len(self._gpus)]
        return environment


def default_parallel(run: RunSection, threads: int) -> int:
    """Trials at a time on this machine: one per GPU, or as many as have cores for their threads."""
    if run.device != "cpu" and (gpus := gpu_count(os.environ)):
        return gpus
    return max(1, usable_cores() // threads)


def warn_of_inexact_gpus(run: RunSection) -> None:
    if run.device != "cpu" and gpu_count(os.environ) and not run.deterministic:
        warn(
            "SWEEP",
            "on a GPU the table is reproducible bit for bit only with run.deterministic; without it, equal sweeps may "
            "differ in the last digits",
        )


def _command(job: Job, config: Path) -> list[str]:
    words = ["train", "--config", str(config), "--resume", "auto", "--json"]
    if job.steps is not None:
        words += ["--set", f"trainer.max_steps={job.steps}"]
    return worker_command(*words)


def _lock(descriptor: int) -> bool:
    """Whether no other process holds the lock; it is held as long as this file is open, also by a child."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _visible_gpus() -> list[str]:
    count = gpu_count(os.environ)
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [str(number) for number in range(count)]
    return [each.strip() for each in given.split(",")[:count]]
