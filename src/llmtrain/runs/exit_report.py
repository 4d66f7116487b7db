"""How a process ended, as data. `status`, `why`, `guard` and `recover` read reports, never the wording of a log.

A report goes to up to three places:
- the launcher: a worker writes to the file that torch's elastic agent named (TORCHELASTIC_ERROR_FILE). An exit code
  cannot say whether 75 means SIGTERM or a lost peer, and only the second is worth a restart;
- Kubernetes: the main process of a pod writes the container's termination message, which can be read without access
  to logs;
- the run directory (`exits/`): operators delete pods on a restart, and the termination message with them.
"""

import contextlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from llmtrain import errors
from llmtrain.core.env import NODE_NAME, TERMINATION_LOG, WORKER
from llmtrain.core.files import read_json, write_json
from llmtrain.core.logs import log
from llmtrain.core.redact import redact
from llmtrain.errors import LlmtrainError, Superseded
from llmtrain.runs.json_values import epoch

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_PEER_CRASHED = "peer-crashed"  # file beside a worker's error file
MAX_BYTES = 4096  # of a termination message; the kubelet truncates longer ones
KEPT = 64  # reports per run directory
_MAX_RANKS = 64  # read from a report; enough to name
_MAX_MESSAGE = 1800  # characters, before JSON escapes them
_MAX_REMEDY = 900
_FIRST_VERSION = {"ResumeMe": "Interrupted", "TrainingStopped": "TrainingFailed"}  # error types, as they were named
_OWN_FIELDS = ("error", "what", "known", "like", "remedy", "reason", "exit_code")  # of LlmtrainError


@dataclass(frozen=True)
class ExitReport:
    """The most important fields come first: a reader may see only the beginning."""

    exit_code: int | None
    """Negative: minus the number of the signal that killed the process. None: not known."""
    error: str = ""
    """Error type, as in errors.py. Empty: the process finished, or wrote no report of its own."""
    reason: str | None = None
    message: str = ""
    remedy: str | None = None
    step: int | None = None
    generation: int | None = None
    rank: int | None = None
    node_rank: int | None = None
    silent_ranks: tuple[int, ...] = ()
    """Ranks without a heartbeat."""
    pod: str = ""
    node: str = ""
    """Kubernetes node."""
    time: str = ""
    was_stopped: bool = False
    """The elastic agent stopped this worker because another one had failed."""
    details: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """LlmtrainError.as_dict and its `like`, for the launcher; not part of a termination message."""

    @classmethod
    def of(cls, error: LlmtrainError) -> "ExitReport":
        values = {**_position, **error.details}
        silent = values.get("silent_ranks")
        return replace(
            cls._here(error.exit_code, values),
            error=type(error).__name__,
            reason=error.reason,
            message=redact(error.what_and_known),
            remedy=redact(error.remedy) if error.remedy else None,
            silent_ranks=tuple(silent) if isinstance(silent, list) else (),
            details={**_position, **error.as_dict(), **({"like": error.like} if error.like else {})},
        )

    @classmethod
    def of_success(cls) -> "ExitReport":
        return cls._here(0, _position)

    @classmethod
    def _here(cls, exit_code: int, values: Mapping[str, Any]) -> "ExitReport":
        """A report of this process, with its position in the run and in the cluster."""
        return cls(
            exit_code=exit_code,
            step=_integer(values.get("step")),
            generation=_integer(values.get("generation")),
            rank=_integer(values.get("rank", os.environ.get("RANK", ""))),
            node_rank=_integer(values.get("node_rank")),
            pod=socket.gethostname(),
            node=os.environ.get(NODE_NAME, ""),
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )

    @classmethod
    def of_worker(cls, rank: int, exit_code: int, error: Mapping[str, Any] | None) -> "ExitReport":
        """A worker, by the code it ended with and the error it reported, if any."""
        details = dict(error or {})
        silent = details.get("silent_ranks")
        return cls(
            exit_code=exit_code,
            error=str(details.get("error") or ""),
            reason=details.get("reason"),
            message=str(details.get("what") or ""),
            rank=rank,
            silent_ranks=tuple(silent) if isinstance(silent, list) else (),
            details=details,
        )

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        del values["details"]
        del values["was_stopped"]
        return values

    def as_termination_message(self) -> str:
        values = self.as_dict()
        limits = [(_MAX_MESSAGE, _MAX_REMEDY), (400, 200), (100, 0)]
        for message, remedy in limits:  # a character beyond ASCII takes up to twelve bytes
            values["message"] = self.message[:message]
            values["remedy"] = self.remedy[:remedy] if self.remedy else None
            text = json.dumps({"llmtrain": values})
            if len(text) <= MAX_BYTES:
                return text
        return json.dumps({"llmtrain": {"exit_code": self.exit_code, "error": self.error, "reason": self.reason}})

    def as_error(self) -> LlmtrainError:
        """The error of the process that wrote this report."""
        error = errors.error_class(self.error)(str(self.details.get("what") or self.message))
        error.known = self.details.get("known")
        error.like = self.details.get("like")
        error.remedy = self.details.get("remedy") or self.remedy
        error.reason = self.reason  # type: ignore[assignment]
        error.details = {name: value for name, value in self.details.items() if name not in _OWN_FIELDS}
        return error


def parse_report(values: Any) -> ExitReport | None:
    """None where the value is not a report of ours: anything can be in a file or a message."""
    try:
        known = {item.name: values[item.name] for item in fields(ExitReport) if item.name in values}
        silent = known.pop("silent_ranks", [])[:_MAX_RANKS]
        known.pop("details", None)
        report = ExitReport(**known, silent_ranks=tuple(int(rank) for rank in silent))
    except (ValueError, OverflowError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(values, dict) or not _has_valid_types(report):
        return None
    return replace(report, error=_FIRST_VERSION.get(report.error, report.error))


@lru_cache(maxsize=64)
def report_times(exits: Path, changed: float | None) -> dict[int, float]:
    """Generation -> time of its exit reports; read again when the directory has `changed`."""
    times = {}
    for path in exits.glob("*.json") if changed is not None else ():
        report = parse_report(read_json(path))
        at = epoch(report.time) if report else None
        if report and report.generation is not None and at is not None:
            times[report.generation] = at
    return times


def _has_valid_types(report: ExitReport) -> bool:
    """A dataclass accepts any value for any field."""
    texts = (report.error, report.message, report.pod, report.node, report.time)
    if not all(isinstance(text, str) for text in texts):
        return False
    for text in (report.reason, report.remedy):
        if text is not None and not isinstance(text, str):
            return False
    for number in (report.step, report.generation, report.rank, report.node_rank):
        if number is not None and _integer(number) != number:
            return False
    return report.exit_code is not None and _integer(report.exit_code) == report.exit_code


def read_termination_message(text: str) -> ExitReport | None:
    try:
        return parse_report(json.loads(text)["llmtrain"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


_is_pod_main = False
_exits: Path | None = None
_position: dict[str, int | None] = {}


def set_position(**values: int | None) -> None:
    """What later reports of this process say about where it was: generation, step, node_rank."""
    _position.update(values)


def set_run_exits(exits: Path) -> None:
    """The report of this process will go into this directory of its run, too. The run belongs to this process."""
    global _exits
    _exits = exits


def forget_earlier_run() -> None:
    """A process may run several commands, one after the other; a report belongs to its own command."""
    global _exits, _is_pod_main
    _exits = None
    _is_pod_main = False
    _position.clear()


def set_pod_main() -> None:
    """This process ends with the pod's exit code, so its report becomes the container's termination message. Others do
    not: workers, whose reports are merged by the process that started them, and commands that a user runs in a pod."""
    global _is_pod_main
    _is_pod_main = True
    _write_termination_message("")  # an earlier process of this container may have left one


def exit_now(error: LlmtrainError) -> NoReturn:
    """Log the error and end the process at once: its main thread is blocked in C++ and cannot raise an exception."""
    log("DDP", f"{error.what} {error.remedy}", logging.ERROR)
    write_exit_report(error)
    os._exit(error.exit_code)


def mark_crashed_peer(error_file: Path) -> None:
    """Called by the agent, before it stops a worker because another one crashed."""
    with contextlib.suppress(OSError):
        error_file.with_name(_PEER_CRASHED).touch()


def has_crashed_peer() -> bool:
    """Whether the agent stops this worker because another one crashed, and no signal came from outside."""
    path = os.environ.get(ERROR_FILE)
    return path is not None and Path(path).with_name(_PEER_CRASHED).exists()


def write_exit_report(error: LlmtrainError) -> None:
    """Never fails: the process ends anyway."""
    report = ExitReport.of(error)
    if path := os.environ.get(ERROR_FILE):
        with contextlib.suppress(OSError):
            Path(path).write_text(_for_the_agent(error, report), encoding="utf-8")
    if _is_pod_main:
        publish(report)
    if _exits and os.environ.get(WORKER) != "1" and not isinstance(error, Superseded):  # then another owns the run
        _write_to_run(_exits, report)


def write_success_report() -> None:
    """Into the run directory only: Kubernetes keeps the exit code 0, and there is nothing to explain."""
    if _exits and os.environ.get(WORKER) != "1":
        _write_to_run(_exits, ExitReport.of_success())


def publish(report: ExitReport) -> None:
    """Make a report this container's termination message."""
    _write_termination_message(report.as_termination_message())


def _write_to_run(exits: Path, report: ExitReport) -> None:
    stamp = re.sub(r"[^0-9]", "", report.time)
    who = re.sub(r"[^A-Za-z0-9.-]", "-", report.pod)[:80]
    with contextlib.suppress(OSError):  # a full disk, say
        if exits.parent.is_dir():
            exits.mkdir(exist_ok=True)
            write_json(exits / f"{stamp}-{who}-{report.rank or 0}.json", report.as_dict())
            for old in sorted(exits.glob("*.json"))[:-KEPT]:
                old.unlink(missing_ok=True)


def _write_termination_message(text: str) -> None:
    path = Path(os.environ.get(TERMINATION_LOG, "/dev/termination-log"))
    with contextlib.suppress(OSError):
        if path.is_file():  # the kubelet creates it; outside a pod there is none
            path.write_text(text, encoding="utf-8")


def _for_the_agent(error: LlmtrainError, report: ExitReport) -> str:
    kind = type(error).__name__
    value = {
        "message": {
            "message": f"{kind}: {error}",
            "errorType": kind,
            "extraInfo": {"py_callstack": str(error), "timestamp": str(int(time.time()))},
        },
        "llmtrain": report.details,
    }
    return json.dumps(value)


def _integer(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.isdecimal():  # of an environment variable, such as RANK
        return int(value)
    return None
