"""torch's elastic agent, with llmtrain's restart rules, and the exit code of every worker."""

import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs

from llmtrain.core.files import read_json
from llmtrain.core.interrupts import is_ignored, leave_at_once
from llmtrain.distributed.worker_exit import JoinState, is_restartable, log_restart
from llmtrain.errors import Interrupted
from llmtrain.runs.exit_report import ExitReport, mark_crashed_peer

HANDLED_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class NodeAgent(LocalElasticAgent):
    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, grace_sec: int, join_state: JoinState) -> None:
        super().__init__(spec, logs)
        self._grace_sec = grace_sec
        self._join_state = join_state
        self.last_crash: str | None = None

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._join_state.is_waiting = True
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._join_state.is_waiting = False  # from here on there are workers to stop
        _leave_ignored_signals()
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Looked up before torch stops the others: afterwards all have failed, and it is not known which did so first.
        failed_first = {worker.rank for worker in self.worker_exits() if worker.exit_code}
        if failed_first and self._pcontext is not None:
            for file in self._pcontext.error_files.values():
                mark_crashed_peer(Path(file))
        result: RunResult = super()._monitor_workers(worker_group)  # stops the others if one has failed
        if result.is_failed():
            exits = self.worker_exits()
            if failed_first:
                exits = [replace(worker, was_stopped=worker.rank not in failed_first) for worker in exits]
            if not is_restartable(exits):
                self._remaining_restarts = 0
            elif self._remaining_restarts > 0:
                self.last_crash = log_restart(exits, self._remaining_restarts - 1)
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        """torch waits 30 s, too short to save a large checkpoint; how to change that depends on its version."""
        if death_sig == signal.SIGINT:
            signal.signal(signal.SIGINT, self._leave_at_once)
        if self._pcontext is not None:
            self._pcontext.close(death_sig, self._grace_sec)

    def _leave_at_once(self, *_: Any) -> None:
        """On a second Ctrl-C: do not wait for the workers to save."""
        context: Any = self._pcontext
        if context is not None:
            for handler in context.subprocess_handlers.values():
                handler.proc.kill()
        text = "Interrupted twice: stopped at once, without saving. Resume from the newest checkpoint with --resume."
        leave_at_once(text, Interrupted.exit_code, keeps_line=True)

    def kill_workers(self, close_rendezvous: bool) -> None:
        """Kill workers that are still running. If the rendezvous is closed, the other nodes do not wait for this one;
        it stays open where this node may be replaced."""
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGKILL, timeout=1)
        with suppress(Exception):
            if close_rendezvous:
                self._rdzv_handler.shutdown()

    def worker_exits(self) -> list[ExitReport]:
        context: Any = self._pcontext
        if context is None:
            return []
        ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        exits = []
        for local_rank, handler in context.subprocess_handlers.items():
            code = handler.proc.poll() or 0
            report = None
            if code:
                report = _reported_by_llmtrain(Path(context.error_files[local_rank]))
            exits.append(ExitReport.of_worker(ranks.get(local_rank, local_rank), code, report))
        return exits


def _reported_by_llmtrain(error_file: Path) -> Any:
    """The part of a worker's error file that llmtrain added to what torch writes."""
    errors = read_json(error_file)
    if not isinstance(errors, dict):
        return None
    return errors.get("llmtrain")


def _leave_ignored_signals() -> None:
    """torch handles its signals also where they are ignored (nohup), and workers would inherit the default action."""
    names = os.environ.get(HANDLED_SIGNALS, "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(",")
    handled = []
    ignored = {number.name for number in signal.Signals if is_ignored(number)}
    for name in names:
        if name.strip() not in ignored:
            handled.append(name)
    os.environ[HANDLED_SIGNALS] = ",".join(handled)
