"""Fault injection for tests: LLMTRAIN_FAULT=point:step:rank:action[:start] injects one fault at a named point.

Actions: kill (SIGKILL to this process), term (SIGTERM), stop (SIGSTOP), enospc (disk full), nan (the loss is NaN; the
point must be `loss`), wait (for as long as the file LLMTRAIN_FAULT_FILE exists). `start` limits the fault to one start
of the processes: 0 is the first, 1 the first restart. Without the variable a fault point costs one dictionary lookup.
"""

import errno
import os
import signal
import time
from pathlib import Path

from llmtrain.core.env import FAULT, FAULT_FILE

POINTS = (
    "prepare",
    "reference",
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
    """Set the rank of this process, which `LLMTRAIN_FAULT` is compared with."""
    global _rank
    _rank = rank


def inject_fault(point: str, step: int) -> str | None:
    """Inject the fault requested for this point; returns the action if the caller has to perform it."""
    fault = os.environ.get(FAULT)
    if not fault:
        return None
    fault_point, fault_step, fault_rank, action, *fault_start = fault.split(":")
    if (fault_point, fault_step, fault_rank) != (point, str(step), str(_rank)):
        return None
    if fault_start and fault_start[0] != os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"):
        return None
    if action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[action])
        return None
    if action == "wait":
        while Path(os.environ[FAULT_FILE]).exists():
            time.sleep(0.05)
        return None
    if action == "enospc":
        raise OSError(errno.ENOSPC, "No space left on device (injected by LLMTRAIN_FAULT)")
    return action
