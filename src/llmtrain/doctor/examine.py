"""The whole preflight of one process: alone, or with all processes of the run."""

import os
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType

from llmtrain.config.schema import Config
from llmtrain.distributed.process_info import ProcessInfo, find_process_info
from llmtrain.doctor.local import checks_after, diagnose, own_checks
from llmtrain.doctor.report import Report
from llmtrain.errors import JoinError, LlmtrainError, UsageError
from llmtrain.findings import Finding, at_rank, failed, failed_by, run_checks

COLLECTIVE_SEC = 120
"""Longest a collective may take here; training waits longer, but a preflight is there to give an answer."""


def examine(config: Config, say: Callable[[Report], None], *, is_local: bool = False) -> bool:
    """Check, let `say` print what was found, and return whether nothing failed, here or on any rank."""
    environ = dict(os.environ)  # as it was given: joining adds to it
    if is_local:
        return _say(Report(diagnose(config, environ)), say)
    try:
        process = find_process_info(environ, socket.gethostname(), config.distributed)
    except UsageError as error:
        return _say(Report(_not_seated(error, diagnose(config, environ))), say)
    if not process.is_launched:
        return _say(Report(diagnose(config, environ)), say)
    return _examine_together(config, process, environ, say)


def _say(report: Report, say: Callable[[Report], None]) -> bool:
    say(report)
    return report.is_ok


def _not_seated(error: UsageError, findings: list[Finding]) -> list[Finding]:
    """A process that cannot join is judged as a process, which is stricter than as a node."""
    rows = error.details.get("problems")
    problems = (
        [(row["what"], row["remedy"]) for row in rows] if isinstance(rows, list) else [(error.what, error.remedy)]
    )
    others = [finding for finding in findings if finding.name != "identity"]
    hint = " `llmtrain doctor --local` looks at this machine only."
    return [*(failed("identity", what, f"{remedy or ''}{hint}".strip()) for what, remedy in problems), *others]


def _examine_together(
    config: Config, process: ProcessInfo, environ: Mapping[str, str], say: Callable[[Report], None]
) -> bool:
    with _Stop() as stop:
        own = at_rank(run_checks(own_checks(config, environ)), process.rank)
        from llmtrain.distributed.control_group import peer_errors
        from llmtrain.distributed.world import join_world
        from llmtrain.doctor.collective import collective_findings

        shorter = min(COLLECTIVE_SEC, config.distributed.timeout_sec)
        distributed = config.distributed.model_copy(update={"timeout_sec": shorter})
        try:
            stop.raise_on_sigterm()
            with peer_errors(), join_world(distributed, config.run) as world:
                parts = world.control.gather(own)
                shared, timings = collective_findings(world)
                stop.defer_sigterm()
                report = Report([f for part in parts for f in part] + shared, timings, world.world_size, world.rank)
                if world.is_first:
                    say(report)
                # Whoever started us ends the others as soon as one has failed: rank 0 must have printed by then.
                with suppress(Exception):
                    world.control.barrier()
                return report.is_ok
        except LlmtrainError as error:
            stop.defer_sigterm()
            found = [*own, *at_rank([failed_by("join", error)], process.rank)]
            if isinstance(error, JoinError):
                found += at_rank(run_checks(checks_after(error, config, environ)), process.rank)
            return _say(Report(found, rank=process.rank), say)


class _Stop:
    """SIGTERM, which a launcher sends when another process has given up. While this one waits for the others it is an
    error like any other that kept it from joining; while it checks and prints it is only noted, so that what was
    found is said."""

    def __init__(self) -> None:
        self._is_waiting = False
        self._is_told = False

    def __enter__(self) -> "_Stop":
        self._before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def raise_on_sigterm(self) -> None:
        self._is_waiting = True
        self._raise_if_told()

    def defer_sigterm(self) -> None:
        self._is_waiting = False

    def _hear(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._is_told = True
        self._raise_if_told()

    def _raise_if_told(self) -> None:
        if self._is_told and self._is_waiting:
            raise JoinError(
                "Told to stop (SIGTERM) while waiting for the other processes.",
                remedy="If nobody did that by hand, another process gave up first: what it printed says why.",
            )
