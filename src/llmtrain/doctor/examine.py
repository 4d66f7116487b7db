"""All preflight checks of one process: local ones, and those with all processes of the run."""

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from types import FrameType
from typing import Any

from llmtrain.config.schema import Config
from llmtrain.core.findings import Finding, at_rank, failed, failed_by, run_checks
from llmtrain.distributed.process_info import ProcessInfo, find_process_info
from llmtrain.doctor.diagnose import checks_after, diagnose, own_checks
from llmtrain.doctor.report import Report, findings_table
from llmtrain.errors import JoinError, LlmtrainError, UsageError

COLLECTIVE_SEC = 120
"""Timeout of collectives in the checks, shorter than that of training."""


def examine(config: Config, show: Callable[[Report], None], *, is_local: bool = False) -> bool:
    """Run the checks, print the report with `show`, and return whether none failed on any rank."""
    environ = dict(os.environ)  # a copy: joining adds variables
    if is_local:
        return _show(Report(diagnose(config, environ)), show)
    try:
        process = find_process_info(environ, socket.gethostname(), config.distributed)
    except UsageError as error:
        return _show(Report(_with_identity_problems(error, diagnose(config, environ))), show)
    if not process.is_launched:
        return _show(Report(diagnose(config, environ)), show)
    return _examine_all_ranks(config, process, environ, show)


def _show(report: Report, show: Callable[[Report], None]) -> bool:
    show(report)
    return report.is_ok


def _with_identity_problems(error: UsageError, findings: list[Finding]) -> list[Finding]:
    """Replace the identity findings of a node with those of a process, whose checks are stricter."""
    rows: Any = error.details.get("problems")
    if not isinstance(rows, list):
        rows = [{"what": error.what, "remedy": error.remedy}]
    problems = []
    for row in rows:
        remedy = row["remedy"] or ""
        remedy += " `llmtrain doctor --local` checks this machine only."
        problems.append(failed("identity", row["what"], remedy.strip()))
    return problems + [finding for finding in findings if finding.name != "identity"]


def _examine_all_ranks(
    config: Config, process: ProcessInfo, environ: Mapping[str, str], show: Callable[[Report], None]
) -> bool:
    with _SigtermHandler() as sigterm:
        own = at_rank(run_checks(own_checks(config, environ)), process.rank)
        from llmtrain.distributed.control_group import peer_errors
        from llmtrain.distributed.world import join_world
        from llmtrain.doctor.collective import collective_findings

        timeout_sec = min(COLLECTIVE_SEC, config.distributed.timeout_sec)
        distributed = config.distributed.model_copy(update={"timeout_sec": timeout_sec})
        try:
            sigterm.raise_on_sigterm()
            with peer_errors(), join_world(distributed, config.run) as world:
                parts = world.control.gather(own)
                shared, timings = collective_findings(world)
                sigterm.defer_sigterm()
                findings = [*chain.from_iterable(parts), *shared]
                report = Report(findings, timings, world.world_size, world.rank)
                if world.is_first:
                    show(report)
                # The launcher stops all processes once one has failed: rank 0 must have printed before that.
                with suppress(Exception):
                    world.control.barrier()
                return report.is_ok
        except LlmtrainError as error:
            sigterm.defer_sigterm()
            findings = own + at_rank([failed_by("join", error)], process.rank)
            if isinstance(error, JoinError):
                findings += at_rank(run_checks(checks_after(error, config.distributed, environ)), process.rank)
            return _show(Report(findings, rank=process.rank), show)


def explain_failed_start(error: LlmtrainError, config: Config, environ: Mapping[str, str] | None = None) -> None:
    """Print the failed local checks on standard error after a failed start. Never raises, so that the original error is
    reported."""
    with suppress(Exception):
        environ = os.environ if environ is None else environ
        checks = own_checks(config, environ, time_writing=False) + checks_after(error, config.distributed, environ)
        problems = [finding for finding in run_checks(checks) if finding.status != "pass"]
        text = " the local checks pass; check the other nodes and the network."
        if problems:
            text = "\n" + findings_table(problems, 1, is_terminal=sys.stderr.isatty())
        print(f"llmtrain doctor on this machine:{text}", file=sys.stderr, flush=True)


class _SigtermHandler:
    """SIGTERM, which a launcher sends when another process has failed. It is an error while this process waits for
    others, and deferred while it checks and prints, so that its findings are shown."""

    def __init__(self) -> None:
        self._is_waiting = False
        self._is_received = False

    def __enter__(self) -> "_SigtermHandler":
        self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def raise_on_sigterm(self) -> None:
        self._is_waiting = True
        self._raise_if_received()

    def defer_sigterm(self) -> None:
        self._is_waiting = False

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._is_received = True
        self._raise_if_received()

    def _raise_if_received(self) -> None:
        if self._is_received and self._is_waiting:
            raise JoinError(
                "Received SIGTERM while waiting for the other processes.",
                remedy="If it was not sent by hand, another process has failed: see the output of that process.",
            )
