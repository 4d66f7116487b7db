"""Faults on purpose, for tests: LLMTRAIN_FAULT=point:step:rank:action makes one happen at a named place.

Actions: kill (SIGKILL to this process), term (SIGTERM), stop (SIGSTOP), enospc (the disk is full), nan (the loss is
not a number; the point must be `loss`). Without the variable a fault point costs one dictionary look-up.
"""

import errno
import os
import signal

POINTS = (
    "forward",
    "loss",
    "after_backward",
    "after_optimizer",
    "evaluate",
    "save_begin",
    "save_model_written",
    "save_before_manifest",
    "save_before_rename",
    "save_while_replacing",
    "save_after_rename",
    "save_before_prune",
    "after_final_save",
)
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}


def fault(point: str, step: int, rank: int = 0) -> str | None:
    """Let the fault happen if it is asked for here; the action's name when the caller has to act on it."""
    asked = os.environ.get("LLMTRAIN_FAULT")
    if not asked:
        return None
    at, at_step, at_rank, action = asked.split(":")
    if (at, at_step, at_rank) != (point, str(step), str(rank)):
        return None
    if action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[action])
        return None
    if action == "enospc":
        raise OSError(errno.ENOSPC, "No space left on device (asked for by LLMTRAIN_FAULT)")
    return action
