"""How the processes of a node ended: what stands for them all, and whether another start is worth it."""

import signal
from dataclasses import dataclass, field
from typing import Any

from llmtrain import errors
from llmtrain.errors import Interrupted, LlmtrainError
from llmtrain.logs import warn

NO_RESTART_CODES = (64, 65)
"""A mistake stays a mistake, however often it is tried."""
TOLD = 75


@dataclass
class JoinState:
    """Whether the agent waits for other agents, inside C++ where Python's signal handlers do not run."""

    is_true: bool = True


@dataclass(frozen=True)
class Ended:
    """How one worker ended."""

    rank: int
    code: int
    """Exit code, or minus the signal that ended it."""
    report: dict[str, Any] = field(default_factory=dict)
    """What it said itself (LlmtrainError.as_dict), where it could."""
    was_stopped: bool = False
    """By the agent, because another one had failed."""

    @property
    def kind(self) -> str | None:
        return self.report.get("error")


def overall(ended: list[Ended], was_told: bool = False) -> LlmtrainError | None:
    """One error for all workers: 64 or 65 over a crash over 75. None when every one finished. `was_told`: the node
    itself was told to stop, and passed that on."""
    failed = [worker for worker in ended if worker.code]
    if not failed:
        return None
    if was_told and not any(worker.report for worker in failed) and all(w.code in _PASSED_ON for w in failed):
        return Interrupted("Stopped as told.")
    # Workers that die of the signal we send after another's failure are no failure of their own; nor is one that hung
    # and had to be killed, which the others have named.
    silent = {rank for worker in failed for rank in worker.report.get("silent_ranks", [])}
    own = [w for w in failed if w.code not in _BY_US and not (w.rank in silent and w.code < 0)] or failed
    worst = min(own, key=_severity)
    code = worst.code if worst.code > 0 else 128 - worst.code
    if worst.report:
        error = error_of(worst.report)
        if type(error) is not Interrupted and len(ended) > 1:
            error.what = f"rank {worst.rank}: {error.what}"
    elif worst.code == TOLD:
        error = Interrupted(f"rank {worst.rank} ended with exit code 75: told to stop.")
    else:
        error = LlmtrainError(f"rank {worst.rank} {_in_words(worst.code)}.")
    error.exit_code = code
    error.details["rank"] = worst.rank
    return error


def error_of(report: dict[str, Any]) -> LlmtrainError:
    """The error that LlmtrainError.as_dict was made of."""
    kinds = {k.__name__: k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, LlmtrainError)}
    kind: Any = kinds.get(str(report.get("error")), LlmtrainError)
    kind = errors.UsageError if kind is errors.ConfigError else kind  # which is made from a list
    error: LlmtrainError = kind(str(report.get("what")))
    error.known, error.remedy, error.reason = report.get("known"), report.get("remedy"), report.get("reason")
    error.details = {k: v for k, v in report.items() if k not in _OWN_FIELDS}
    return error


_BY_US = (-signal.SIGTERM, -signal.SIGINT)
_PASSED_ON = (*_BY_US, TOLD)
_OWN_FIELDS = ("error", "what", "known", "remedy", "reason", "exit_code")


def _severity(worker: Ended) -> tuple[int, int]:
    if worker.code in NO_RESTART_CODES:
        return 0, worker.rank
    if worker.code != TOLD:
        return 1, worker.rank
    return (2 if worker.kind != "PeerLost" else 3), worker.rank


def _in_words(code: int) -> str:
    if code >= 0:
        return f"crashed with exit code {code}; its output says why"
    known = {int(each): each.name for each in signal.Signals}
    name = known.get(-code, f"signal {-code}")
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"


def is_worth_a_restart(ended: list[Ended]) -> bool:
    failed = [worker for worker in ended if worker.code and worker.code not in _BY_US]
    if any(worker.code in NO_RESTART_CODES for worker in failed):
        return False
    return not any(w.code == TOLD and w.kind != "PeerLost" and not w.was_stopped for w in failed)


def log_restart(ended: list[Ended], left: int) -> None:
    failed = next((w for w in sorted(ended, key=_severity) if w.code), None)
    if failed is not None:
        why = f": {failed.report['what']}" if failed.report else f" {_in_words(failed.code)}."
        warn("DDP", f"rank {failed.rank}{why} Starting the processes again ({left} restarts left)")
