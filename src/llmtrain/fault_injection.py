"""Faults on purpose, for tests: LLMTRAIN_FAULT=point:step:rank:action makes one happen at a named place. With a fifth
part only that start of the processes is hit: 0 is the first, 1 the first restart.

Actions: kill (SIGKILL to this process), term (SIGTERM), stop (SIGSTOP), enospc (the disk is full), nan (the loss is
not a number; the point must be `loss`), wait (for as long as the file LLMTRAIN_FAULT_FILE exists). Without the variable
a fault point costs one dictionary look-up.
"""

import errno
import os
import signal
import time
from pathlib import Path

from llmtrain.env import FAULT, FAULT_FILE

POINTS = (
    "prepare",
    "forward",
    "loss",
    "after_backward",
    "after_optimizer",
    "evaluate",
    "save_begin",
    "save_model_written",
    "save_before_manifest",
    "save_before_rename",
    "save_published",
    "save_while_replacing",
    "save_after_rename",
    "save_before_prune",
    "after_final_save",
)
_rank = 0
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}


def set_rank(rank: int) -> None:
    """Which rank this process is, for points that are the same on all."""
    global _rank
    _rank = rank


def inject_fault(point: str, step: int) -> str | None:
    """Let the fault happen if it is asked for here; the action's name when the caller has to act on it."""
    asked = os.environ.get(FAULT)
    if not asked:
        return None
    at, at_step, at_rank, action, *at_start = asked.split(":")
    if (at, at_step, at_rank) != (point, str(step), str(_rank)):
        return None
    if at_start and at_start[0] != os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"):
        return None
    if action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[action])
        return None
    if action == "wait":
        while Path(os.environ[FAULT_FILE]).exists():
            time.sleep(0.05)
        return None
    if action == "enospc":
        raise OSError(errno.ENOSPC, "No space left on device (asked for by LLMTRAIN_FAULT)")
    return action
