"""Exits of the worker processes of a node: the error that represents them all, and whether to restart them."""

import signal
from dataclasses import dataclass

from llmtrain.core.logs import warn
from llmtrain.errors import ExitCode, Interrupted, LlmtrainError
from llmtrain.runs.exit_report import ExitReport

NO_RESTART_CODES = (ExitCode.USAGE, ExitCode.FAILED)
"""Errors that a restart does not fix: of usage, config, data or checkpoint."""


@dataclass
class JoinState:
    is_waiting: bool = True
    """For other agents, in C++ where Python's signal handlers do not run."""


def merge_exits(
    exits: list[ExitReport], was_interrupted: bool = False, last_crash: str | None = None
) -> LlmtrainError | None:
    """One error for all workers: 64 or 65 over a crash over 75. None if all workers finished. `was_interrupted`: the
    node received a signal and forwarded it. `last_crash`: why the workers were restarted last."""
    failed = [worker for worker in exits if worker.exit_code]
    if not failed:
        return None
    have_all_stopped = all(worker.exit_code in _INTERRUPTED_CODES and not worker.error for worker in failed)
    if was_interrupted and have_all_stopped:
        return Interrupted("Interrupted: the node received a signal.")
    worst = min(_independent(failed) or failed, key=_severity)
    error = _error_of(worst, is_only_worker=len(exits) == 1)
    if error.reason == "gave_up" and last_crash:
        error.what += f" The last crash: {last_crash}"
    error.exit_code = _shell_code(worst)
    error.details["rank"] = worst.rank
    return error


def _error_of(worker: ExitReport, is_only_worker: bool) -> LlmtrainError:
    """The error that a failed worker reported, or one for its exit code."""
    if worker.error:
        error = worker.as_error()
        if type(error) is not Interrupted and not is_only_worker:
            error.what = f"rank {worker.rank}: {error.what}"
        return error
    if worker.exit_code == ExitCode.INTERRUPTED:
        return Interrupted(f"rank {worker.rank} was interrupted (exit code {ExitCode.INTERRUPTED}).")
    return LlmtrainError(f"rank {worker.rank} {_describe(_code(worker))}.")


def _shell_code(worker: ExitReport) -> int:
    """The exit code as a shell reports it: 137 for SIGKILL, for which Python has -9."""
    code = _code(worker)
    if code <= 0:
        return 128 - code
    return code


def _independent(failed: list[ExitReport]) -> list[ExitReport]:
    """Those whose end did not follow from another's. Neither workers that the agent stopped after another's failure
    count, nor one that hung and had to be killed, if others have reported it."""
    reported: set[int] = set()
    for worker in failed:
        reported.update(worker.silent_ranks)
    independent = []
    for worker in failed:
        was_killed_hanging = worker.rank in reported and _code(worker) < 0
        if worker.exit_code not in _STOP_SIGNALS and not was_killed_hanging:
            independent.append(worker)
    return independent


_STOP_SIGNALS = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
_INTERRUPTED_CODES = (*_STOP_SIGNALS, ExitCode.INTERRUPTED)


def severity(code: int | None) -> int:
    """Order of exit codes when one represents several: 64 or 65, then a crash, then 75, then 0. The lowest wins."""
    if code in NO_RESTART_CODES:
        return 0
    if code == ExitCode.FINISHED:
        return 3
    if code == ExitCode.INTERRUPTED:
        return 2
    return 1


def _severity(worker: ExitReport) -> tuple[int, bool, int]:
    return severity(worker.exit_code), worker.error == "PeerLost", worker.rank or 0


def _code(worker: ExitReport) -> int:
    return worker.exit_code or 0


def _describe(code: int) -> str:
    if code >= 0:
        return f"crashed with exit code {code}; see its output"
    if -code == signal.SIGKILL:  # the kernel's out-of-memory killer sends it
        return "was killed by SIGKILL (out of memory?)"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"was killed by {name}"


def is_restartable(exits: list[ExitReport]) -> bool:
    """Whether the workers crashed or lost a peer, rather than failing for good or being interrupted."""
    for worker in exits:
        if worker.exit_code in NO_RESTART_CODES:
            return False
        was_interrupted = worker.exit_code == ExitCode.INTERRUPTED and worker.error != "PeerLost"
        if was_interrupted and not worker.was_stopped:
            return False
    return True


def joined_earlier_start(exits: list[ExitReport]) -> bool:
    """Whether the workers replaced others, and only waited for the end of the processes that had lost those."""
    reasons = {worker.reason for worker in exits if worker.exit_code not in (0, *_INTERRUPTED_CODES)}
    return reasons == {"earlier_start_ended"}


def log_restart(exits: list[ExitReport], remaining: int) -> str | None:
    """Log why the workers are restarted, and return it."""
    failed = [worker for worker in exits if worker.exit_code]
    if not failed:
        return None
    worst = min(failed, key=_severity)
    if worst.error:
        why = f"rank {worst.rank}: {worst.message}"
    else:
        why = f"rank {worst.rank} {_describe(_code(worst))}."
    warn("DDP", f"{why} Restarting the processes ({remaining} restarts left)")
    return why
