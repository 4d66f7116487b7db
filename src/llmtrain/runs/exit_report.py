"""How a process ended, in words, for the launcher that started it: torch's elastic agent names a file to every worker.

An exit code cannot say whether 75 means "told to stop" or "a peer was lost", and only the second is worth a restart.
"""

import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import NoReturn

from llmtrain.errors import LlmtrainError
from llmtrain.logs import log

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
PREFETCHED = "LLMTRAIN_PREFETCHED"
"""Environment variable of a pod whose init container asked the hub: where that wrote its mistake, if it made one."""


def exit_now(error: LlmtrainError) -> NoReturn:
    """End the process at once, with a word: its main thread is inside C++, which takes no exception."""
    log("DDP", f"{error.what} {error.remedy}", logging.ERROR)
    write_exit_report(error)
    os._exit(error.exit_code)


def write_exit_report(error: LlmtrainError) -> None:
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    kind = type(error).__name__
    report = {
        "message": {
            "message": f"{kind}: {error}",
            "errorType": kind,
            "extraInfo": {"py_callstack": str(error), "timestamp": str(int(time.time()))},
        },
        "llmtrain": error.as_dict(),
    }
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps(report), encoding="utf-8")
