"""torch's elastic agent, with llmtrain's restart rules, and the exit code of every worker."""

import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs

from llmtrain.distributed.worker_exit import JoinState, is_restartable, log_restart
from llmtrain.errors import Interrupted
from llmtrain.files import read_json
from llmtrain.interrupts import leave_at_once
from llmtrain.runs.exit_report import ExitReport, tell_of_crashed_peer


class NodeAgent(LocalElasticAgent):
    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, grace_sec: int, join_state: JoinState) -> None:
        super().__init__(spec, logs)
        self._grace_sec, self._join_state = grace_sec, join_state
        self.last_crash: str | None = None

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._join_state.is_waiting = True
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._join_state.is_waiting = False  # from here on there are workers to stop
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        failed_first = {worker.rank for worker in self.worker_exits() if worker.exit_code}
        if failed_first and self._pcontext is not None:
            for file in self._pcontext.error_files.values():
                tell_of_crashed_peer(Path(file))
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
        for handler in context.subprocess_handlers.values() if context else ():
            handler.proc.kill()
        text = "Interrupted twice: stopped at once, without saving. Resume from the newest checkpoint with --resume."
        leave_at_once(text, Interrupted.exit_code, keeps_line=True)

    def kill_workers(self, close_rendezvous: bool) -> None:
        """Kill workers that are still running. A closed rendezvous tells the other nodes not to wait for this one; it
        stays open where this node may be replaced."""
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
            code = handler.proc.poll()
            report = (read_json(Path(context.error_files[local_rank])) or {}) if code else {}
            own = report.get("llmtrain") if isinstance(report, dict) else None
            exits.append(ExitReport.of_worker(ranks.get(local_rank, local_rank), code or 0, own))
        return exits
