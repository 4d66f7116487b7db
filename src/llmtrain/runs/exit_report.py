"""How a process ended, as data: `why`, `status` and the launcher read it, never the wording of a log.

A worker reports to the launcher that started it (torch's elastic agent names a file to every worker). An exit code
cannot say whether 75 means SIGTERM or a lost peer, and only the second is worth a restart. The process that speaks for
a pod reports to Kubernetes: the container's termination message, which can be read without access to logs.
"""

import contextlib
import json
import logging
import os
import socket
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from llmtrain.env import TERMINATION_LOG
from llmtrain.errors import LlmtrainError
from llmtrain.logs import log
from llmtrain.redact import redact

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
MAX_BYTES = 4096  # of a termination message; the kubelet cuts the rest off
_MAX_RANKS = 64  # that are read: enough to name
_MAX_MESSAGE, _MAX_REMEDY = 1800, 900  # characters, before what JSON makes of them


@dataclass(frozen=True)
class ExitReport:
    """The fields that matter most come first: a reader may see only the beginning."""

    exit_code: int
    error: str
    """The type, as in errors.py."""
    reason: str | None = None
    message: str = ""
    remedy: str | None = None
    rank: int | None = None
    silent_ranks: tuple[int, ...] = ()
    """Ranks that sent no heartbeat."""
    pod: str = ""
    time: str = ""

    @classmethod
    def of(cls, error: LlmtrainError) -> "ExitReport":
        silent, rank = error.details.get("silent_ranks"), error.details.get("rank")
        rank = os.environ.get("RANK", "") if rank is None else str(rank)
        return cls(
            exit_code=error.exit_code,
            error=type(error).__name__,
            reason=error.reason,
            message=redact(error.what_and_known),
            remedy=redact(error.remedy) if error.remedy else None,
            rank=int(rank) if rank.isdecimal() else None,
            silent_ranks=tuple(silent) if isinstance(silent, list) else (),
            pod=socket.gethostname(),
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )

    def as_termination_message(self) -> str:
        values = asdict(self)
        limits = [(_MAX_MESSAGE, _MAX_REMEDY), (400, 200), (100, 0)]
        for message, remedy in limits:  # characters beyond ASCII take up to twelve bytes each
            values["message"] = self.message[:message]
            values["remedy"] = self.remedy[:remedy] if self.remedy else None
            text = json.dumps({"llmtrain": values})
            if len(text) <= MAX_BYTES:
                return text
        return json.dumps({"llmtrain": {"exit_code": self.exit_code, "error": self.error, "reason": self.reason}})


def read_termination_message(text: str) -> ExitReport | None:
    """None where the message is not one of ours: anything can be in it."""
    try:
        values = json.loads(text)["llmtrain"]
        known: dict[str, Any] = {field.name: values[field.name] for field in fields(ExitReport) if field.name in values}
        silent = known.pop("silent_ranks", [])[:_MAX_RANKS]
        report = ExitReport(**known, silent_ranks=tuple(int(rank) for rank in silent))
    except (ValueError, OverflowError, TypeError, KeyError, RecursionError):
        return None
    texts = (report.error, report.message, report.pod, report.time, report.reason or "", report.remedy or "")
    is_code = isinstance(report.exit_code, int) and not isinstance(report.exit_code, bool)
    return report if is_code and all(isinstance(each, str) for each in texts) else None


def exit_now(error: LlmtrainError) -> NoReturn:
    """End the process at once, with a word: its main thread is inside C++, which takes no exception."""
    log("DDP", f"{error.what} {error.remedy}", logging.ERROR)
    write_exit_report(error)
    os._exit(error.exit_code)


def write_exit_report(error: LlmtrainError) -> None:
    """For whoever started this process. Never fails: the process ends anyway."""
    if path := os.environ.get(ERROR_FILE):
        with contextlib.suppress(OSError):
            Path(path).write_text(_for_the_agent(error), encoding="utf-8")
    if _speaks_for_pod:
        _write_termination_message(ExitReport.of(error).as_termination_message())


def speak_for_pod() -> None:
    """This process ends with the pod's exit code: a worker's report is merged by the node that started it, and a
    command that somebody runs in a pod is not how the pod ends."""
    global _speaks_for_pod
    _speaks_for_pod = True
    _write_termination_message("")  # of an earlier process of this container


_speaks_for_pod = False


def _write_termination_message(text: str) -> None:
    path = Path(os.environ.get(TERMINATION_LOG, "/dev/termination-log"))
    with contextlib.suppress(OSError):
        if path.is_file():  # outside a pod there is none, and none is made
            path.write_text(text, encoding="utf-8")


def _for_the_agent(error: LlmtrainError) -> str:
    kind = type(error).__name__
    report = {
        "message": {
            "message": f"{kind}: {error}",
            "errorType": kind,
            "extraInfo": {"py_callstack": str(error), "timestamp": str(int(time.time()))},
        },
        "llmtrain": error.as_dict(),
    }
    return json.dumps(report)
