"""How the processes of a node ended: what stands for them all, and whether another start is worth it."""

import signal
from dataclasses import dataclass

from llmtrain.errors import Interrupted, LlmtrainError
from llmtrain.logs import warn
from llmtrain.runs.exit_report import ExitReport

NO_RESTART_CODES = (64, 65)
"""A mistake stays a mistake, however often it is tried."""
TOLD = 75


@dataclass
class JoinState:
    """Whether the agent waits for other agents, inside C++ where Python's signal handlers do not run."""

    waiting: bool = True


def overall(ended: list[ExitReport], was_told: bool = False) -> LlmtrainError | None:
    """One error for all workers: 64 or 65 over a crash over 75. None when every one finished. `was_told`: the node
    itself was told to stop, and passed that on."""
    failed = [worker for worker in ended if worker.exit_code]
    if not failed:
        return None
    if was_told and not any(worker.error for worker in failed) and all(w.exit_code in _PASSED_ON for w in failed):
        return Interrupted("Stopped as told.")
    # Workers that die of the signal we send after another's failure are no failure of their own; nor is one that hung
    # and had to be killed, which the others have named.
    silent = {rank for worker in failed for rank in worker.silent_ranks}
    own = [w for w in failed if w.exit_code not in _BY_US and not (w.rank in silent and _code(w) < 0)] or failed
    worst = min(own, key=_severity)
    code = _code(worst) if _code(worst) > 0 else 128 - _code(worst)
    if worst.error:
        error = worst.as_error()
        if type(error) is not Interrupted and len(ended) > 1:
            error.what = f"rank {worst.rank}: {error.what}"
    elif worst.exit_code == TOLD:
        error = Interrupted(f"rank {worst.rank} ended with exit code 75: told to stop.")
    else:
        error = LlmtrainError(f"rank {worst.rank} {_in_words(_code(worst))}.")
    error.exit_code = code
    error.details["rank"] = worst.rank
    return error


_BY_US = (-signal.SIGTERM, -signal.SIGINT)
_PASSED_ON = (*_BY_US, TOLD)


def _severity(worker: ExitReport) -> tuple[int, int]:
    rank = worker.rank or 0
    if worker.exit_code in NO_RESTART_CODES:
        return 0, rank
    if worker.exit_code != TOLD:
        return 1, rank
    return (2 if worker.error != "PeerLost" else 3), rank


def _code(worker: ExitReport) -> int:
    return worker.exit_code or 0


def _in_words(code: int) -> str:
    if code >= 0:
        return f"crashed with exit code {code}; its output says why"
    known = {int(each): each.name for each in signal.Signals}
    name = known.get(-code, f"signal {-code}")
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"


def is_worth_a_restart(ended: list[ExitReport]) -> bool:
    failed = [worker for worker in ended if worker.exit_code and worker.exit_code not in _BY_US]
    if any(worker.exit_code in NO_RESTART_CODES for worker in failed):
        return False
    return not any(w.exit_code == TOLD and w.error != "PeerLost" and not w.was_stopped for w in failed)


def log_restart(ended: list[ExitReport], left: int) -> None:
    failed = next((w for w in sorted(ended, key=_severity) if w.exit_code), None)
    if failed is not None:
        why = f": {failed.message}" if failed.error else f" {_in_words(_code(failed))}."
        warn("DDP", f"rank {failed.rank}{why} Starting the processes again ({left} restarts left)")
