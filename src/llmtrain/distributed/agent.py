"""torch's elastic agent with our rules: what is worth a restart, and every worker's exit code kept."""

import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs

from llmtrain.distributed.worker_exit import JoinState, is_worth_a_restart, log_restart
from llmtrain.files import read_json
from llmtrain.runs.exit_report import ExitReport


class NodeAgent(LocalElasticAgent):
    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, grace_sec: int, joining: JoinState) -> None:
        super().__init__(spec, logs)
        self._grace_sec, self._joining = grace_sec, joining

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._joining.waiting = True
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._joining.waiting = False  # from here on there are workers to stop first
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        failed_first = {worker.rank for worker in self.ended() if worker.exit_code}
        result: RunResult = super()._monitor_workers(worker_group)  # where one has failed, torch stops the others
        if result.is_failed():
            ended = self.ended()
            if failed_first:
                ended = [replace(worker, was_stopped=worker.rank not in failed_first) for worker in ended]
            if not is_worth_a_restart(ended):
                self._remaining_restarts = 0
            elif self._remaining_restarts > 0:
                log_restart(ended, self._remaining_restarts - 1)
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        """torch waits 30 s, which a large checkpoint may not fit into (and its versions differ in how to say more)."""
        if self._pcontext is not None:
            self._pcontext.close(death_sig, self._grace_sec)

    def end_all(self, close_meeting: bool) -> None:
        """No process is left behind, whatever made the agent leave. A closed meeting cannot be joined again: the others
        need not wait for this node; one that was told to stop may be replaced, and leaves it open."""
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGKILL, timeout=1)
        with suppress(Exception):
            if close_meeting:
                self._rdzv_handler.shutdown()

    def ended(self) -> list[ExitReport]:
        """How every worker of this node ended."""
        context: Any = self._pcontext
        if context is None:
            return []
        ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        found = []
        for local_rank, handler in context.subprocess_handlers.items():
            code = handler.proc.poll()
            report = (read_json(Path(context.error_files[local_rank])) or {}) if code else {}
            said = report.get("llmtrain") if isinstance(report, dict) else None
            found.append(ExitReport.of_worker(ranks.get(local_rank, local_rank), code or 0, said))
        return found
