"""Exits of the worker processes of a node: the error that represents them all, and whether to restart them."""

import signal
from dataclasses import dataclass

from llmtrain.errors import Interrupted, LlmtrainError
from llmtrain.logs import warn
from llmtrain.runs.exit_report import ExitReport

NO_RESTART_CODES = (64, 65)
"""Errors that a restart does not fix: of usage, config, data or checkpoint."""
INTERRUPTED = Interrupted.exit_code


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
    if was_interrupted and not any(w.error for w in failed) and all(w.exit_code in _INTERRUPTED_CODES for w in failed):
        return Interrupted("Interrupted: the node received a signal.")
    # Neither workers that the agent stopped after another's failure count, nor one that hung and had to be killed, if
    # others have reported it.
    silent = {rank for worker in failed for rank in worker.silent_ranks}
    own = [w for w in failed if w.exit_code not in _STOP_SIGNALS and not (w.rank in silent and _code(w) < 0)] or failed
    worst = min(own, key=_severity)
    code = _code(worst) if _code(worst) > 0 else 128 - _code(worst)
    if worst.error:
        error = worst.as_error()
        if type(error) is not Interrupted and len(exits) > 1:
            error.what = f"rank {worst.rank}: {error.what}"
    elif worst.exit_code == INTERRUPTED:
        error = Interrupted(f"rank {worst.rank} was interrupted (exit code {INTERRUPTED}).")
    else:
        error = LlmtrainError(f"rank {worst.rank} {_describe(_code(worst))}.")
    if error.reason == "gave_up" and last_crash:
        error.what += f" The last crash: {last_crash}"
    error.exit_code = code
    error.details["rank"] = worst.rank
    return error


_STOP_SIGNALS = (-signal.SIGTERM, -signal.SIGINT)
_INTERRUPTED_CODES = (*_STOP_SIGNALS, INTERRUPTED)


def severity(code: int | None) -> int:
    """Order of exit codes when one represents several: 64 or 65, then a crash, then 75, then 0. The lowest wins."""
    return 0 if code in NO_RESTART_CODES else 3 if code == 0 else 2 if code == INTERRUPTED else 1


def _severity(worker: ExitReport) -> tuple[int, bool, int]:
    return severity(worker.exit_code), worker.error == "PeerLost", worker.rank or 0


def _code(worker: ExitReport) -> int:
    return worker.exit_code or 0


def _describe(code: int) -> str:
    if code >= 0:
        return f"crashed with exit code {code}; see its output"
    names = {int(number): number.name for number in signal.Signals}
    name = names.get(-code, f"signal {-code}")
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def is_restartable(exits: list[ExitReport]) -> bool:
    """Whether the workers crashed or lost a peer, rather than failing for good or being interrupted."""
    failed = [worker for worker in exits if worker.exit_code and worker.exit_code not in _STOP_SIGNALS]
    if any(worker.exit_code in NO_RESTART_CODES for worker in failed):
        return False
    return not any(w.exit_code == INTERRUPTED and w.error != "PeerLost" and not w.was_stopped for w in failed)


def joined_earlier_start(exits: list[ExitReport]) -> bool:
    """Whether the workers replaced others, and only waited for the end of the processes that had lost those."""
    failed = [worker for worker in exits if worker.exit_code not in (0, *_INTERRUPTED_CODES)]
    return bool(failed) and all(worker.reason == "earlier_start_ended" for worker in failed)


def log_restart(exits: list[ExitReport], remaining: int) -> str | None:
    """Log why the workers are restarted, and return it."""
    failed = next((w for w in sorted(exits, key=_severity) if w.exit_code), None)
    if failed is None:
        return None
    why = f": {failed.message}" if failed.error else f" {_describe(_code(failed))}."
    warn("DDP", f"rank {failed.rank}{why} Restarting the processes ({remaining} restarts left)")
    return f"rank {failed.rank}{why}"
