"""Exit codes for platforms with other conventions. (What the codes mean is in llmtrain/errors.py; which one a node
takes when its processes end differently, in worker_exit.py.) LLMTRAIN_EXIT_CODES names the platform of `llmtrain node`:

    pytorchjob   retries only codes from 128: 128 is added to codes after which a restart may help.
    statefulset  restarts containers whatever their exit code. A node that ends with 0, 64 or 65 exits once, so that
                 the pod's status keeps its code and report, and leaves a marker in the pod; the restarted container
                 sees the marker and waits for its deletion. ended.json in the run directory does the same for pods
                 that are recreated later (after a node was drained, or after losing a peer that waits), so that they
                 neither start the run again nor wait for the others.

There the node runs in a child process, because some exits cannot be translated from inside it: os._exit of the
watchdog, a signal, a command that replaced the process.
"""

import ctypes
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.core.env import EXIT_CODES, LAUNCH, RUN_DIR
from llmtrain.core.files import read_json, write_json
from llmtrain.core.interrupts import stop_signals
from llmtrain.core.logs import log, setup_logging, warn
from llmtrain.core.text import plural
from llmtrain.distributed.worker_exit import NO_RESTART_CODES
from llmtrain.errors import ExitCode, LlmtrainError, TrainingFailed, UsageError, nearest
from llmtrain.runs.exit_report import ExitReport, parse_report, write_exit_report
from llmtrain.runs.generations import MAX_CRASHES

if TYPE_CHECKING:
    from llmtrain.config.output import OutputSection
    from llmtrain.runs.directory import RunDirectory

IDLE_MARK = "ended with exit code"
"""Text in the log of a pod that waits for its deletion; the code and a semicolon follow it."""
PLATFORMS = ("pytorchjob", "statefulset")
FINAL_CODES = (ExitCode.FINISHED, *NO_RESTART_CODES)
"""Exit codes after which a run is not restarted."""
_NO_CRASH = (*FINAL_CODES, ExitCode.UNAVAILABLE, ExitCode.INTERRUPTED)
LONG_RUN_SEC = 3600.0
"""After a run of this length, crashes of a user's command are counted from 1 again."""
RETRIED_FROM = 128
# Signals of Linux are 1 to 64. A container exits with 128 + N after signal N, so codes from 129 to 192 have two
# meanings in a PyTorchJob.
_HIGHEST_SIGNAL = 64


def platform_of(environment: Mapping[str, str]) -> str | None:
    """The platform whose exit-code convention applies; None if codes are passed on unchanged."""
    name = environment.get(EXIT_CODES)
    if name and name not in PLATFORMS:
        raise UsageError(f"{EXIT_CODES}={name} is unknown.{nearest(name, PLATFORMS)}", known=PLATFORMS)
    return name or None


def run_in_child(is_command: bool = False) -> int | None:
    """On a platform with its own convention: run the node in a child process, and return the translated exit code. None
    in the child and on other platforms, where the caller is the node. `is_command`: the node runs a command of the
    user; its crashes are counted here."""
    platform = platform_of(os.environ)
    if platform is None:
        return None
    if platform == "statefulset" and (marker := _read_end(_marker())) is not None:
        return _wait_for_deletion(marker["exit_code"])
    # Blocked signals stay pending until sigwait: none is lost, neither around the fork nor later.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*stop_signals(), signal.SIGCHLD))
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        terminate_with_parent()
        os.setpgid(0, 0)  # Ctrl-C reaches the child once, forwarded by this process
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None
    code, was_interrupted = _supervise(child)
    if is_command:
        code = _count_crash(code, was_interrupted, time.monotonic() - started)
    if platform == "pytorchjob":
        return pytorchjob_code(code)
    if code not in FINAL_CODES or was_interrupted:
        return code  # the container is restarted, and the run resumes
    if _write_marker(code):
        return code  # the restarted container finds the marker and waits
    return _wait_for_deletion(code)


def _count_crash(code: int, was_interrupted: bool, ran_sec: float) -> int:
    """The exit code, or 65 after too many crashes in a row."""
    try:
        count_crash(code, was_interrupted, ran_sec)
    except LlmtrainError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        write_exit_report(error)
        return error.exit_code
    return code


def count_crash(code: int, was_interrupted: bool, ran_sec: float, environ: Mapping[str, str] = os.environ) -> None:
    """Count this end of the command if it is a crash, on the runs volume: PyTorchJobs and StatefulSets restart a pod
    without limit. Raises TrainingFailed at the third in a row. (llmtrain's trainer counts its crashes by its
    checkpoints, see runs/generations.py. Of another program only the run time is known.)"""
    directory = environ.get(RUN_DIR)
    launch = environ.get(LAUNCH)
    if not directory or not launch or was_interrupted or code in _NO_CRASH:
        return
    pod = re.sub(r"[^a-zA-Z0-9-]", "-", socket.gethostname())
    file = Path(directory) / f"crashes-{pod}.json"
    crashes = 1
    before = read_json(file)
    if isinstance(before, dict) and before.get("launch") == launch and ran_sec < LONG_RUN_SEC:
        previous = before.get("crashes")
        if isinstance(previous, int):
            crashes += previous
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"launch": launch, "crashes": crashes, "exit_code": code})
    except OSError as problem:
        warn("DDP", f"cannot write {file} ({problem.strerror}): crashes are not counted")
    if crashes >= MAX_CRASHES:
        raise TrainingFailed(
            f"The command crashed {crashes} times in a row in this pod, the last time with exit code {code}.",
            remedy=f"See its output for the cause. Fix it, then run: llmtrain resume {Path(directory).name}",
            reason="gave_up",
        )


def terminate_with_parent() -> None:
    """Send SIGTERM to this process when its parent ends: it would otherwise continue to train unsupervised."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def pytorchjob_code(code: int) -> int:
    if code in FINAL_CODES or code >= RETRIED_FROM:
        return code
    return code + RETRIED_FROM


def from_pytorchjob_code(code: int) -> int:
    """The inverse of pytorchjob_code. Codes from 130 to 192 are unchanged: they more likely stand for a signal."""
    was_added = code == RETRIED_FROM + 1 or code > RETRIED_FROM + _HIGHEST_SIGNAL
    if not was_added:
        return code
    return code - RETRIED_FROM


def _supervise(child: int) -> tuple[int, bool]:
    """The exit code of the child (128 + N for signal N), and whether a signal was forwarded to it."""
    was_interrupted = False
    while True:
        number = signal.sigwait((*stop_signals(), signal.SIGCHLD))
        if number != signal.SIGCHLD:
            was_interrupted = True
            os.kill(child, number)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            if code < 0:  # minus the number of a signal
                code = 128 - code
            return code, was_interrupted


def _marker() -> Path:
    """A file in an emptyDir, which outlives the container but not the pod."""
    return Path(os.environ.get("TMPDIR") or "/tmp") / "llmtrain-exit-code.json"


def _write_marker(code: int) -> bool:
    try:
        write_json(_marker(), {"launch": _launch(), "exit_code": code})
    except OSError:
        return False
    return True


def _read_end(path: Path) -> dict[str, Any] | None:
    """The recorded end of this launch, in the marker or in ended.json; None if there is none."""
    record = read_json(path)
    if not isinstance(record, dict) or record.get("launch") != _launch():
        return None
    if record.get("exit_code") not in FINAL_CODES:
        return None
    return record


def _wait_for_deletion(code: int) -> int:
    from llmtrain.config.logging import LoggingSection

    # With default settings: the line is parsed, whatever logging the run's config selects.
    setup_logging(LoggingSection())
    log("DDP", f"{IDLE_MARK} {code}; a StatefulSet would start this again, so the pod waits to be removed")
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    signal.sigwait(stop_signals())
    return 0


def refuse_surplus_pod(environment: Mapping[str, str], hostname: str, max_nodes: int) -> None:
    """Raise UsageError in a pod of a StatefulSet that was scaled beyond the nodes of its run. The end of such a pod is
    not recorded: the other pods continue."""
    if platform_of(environment) != "statefulset":
        return
    index = environment.get("POD_INDEX") or hostname.rpartition("-")[2]
    if index.isdecimal() and int(index) >= max_nodes:
        name = hostname.removesuffix(f"-{index}")
        count = int(index) + 1
        raise UsageError(
            f"The StatefulSet was scaled up: pod {index} is not part of the run of {plural(max_nodes, 'node')}.",
            remedy=f"To use more nodes: llmtrain stop {name}, then llmtrain resume {name} --nodes {count}. To undo it: "
            f"kubectl scale statefulset {name} --replicas={max_nodes}.",
        )


# ended.json, for pods that are recreated


def run_to_record(output: "OutputSection") -> "RunDirectory | None":
    """The run if its end is to be recorded: it has an id, and its platform may recreate pods after the end, which would
    wait for peers that no longer exist."""
    from llmtrain.runs.directory import RunDirectory

    is_launched = platform_of(os.environ) == "statefulset" or LAUNCH in os.environ
    if not is_launched or not output.run_id:
        return None
    return RunDirectory(Path(output.root_dir).expanduser() / output.run_id)


def ended_before(run: "RunDirectory") -> ExitReport | None:
    """The recorded end of this launch of the run; None if it has not ended."""
    record = _read_end(run.ended)
    if record is None:
        return None
    return parse_report(record.get("report")) or ExitReport(record["exit_code"])


@contextmanager
def record_end(run: "RunDirectory | None") -> Iterator[None]:
    """Write ended.json when the block ends with a final exit code."""
    try:
        yield
    except LlmtrainError as error:
        if run and error.exit_code in FINAL_CODES:
            _write_end(run, ExitReport.of(error))
        raise
    if run:
        _write_end(run, ExitReport(0))


def _write_end(run: "RunDirectory", report: ExitReport) -> None:
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        write_json(run.ended, {"launch": _launch(), "exit_code": report.exit_code, "report": report.as_dict()})
    except OSError as problem:
        warn("DDP", f"{run.ended} cannot be written ({problem.strerror}): a recreated pod will start the run again")


def _launch() -> str:
    return os.environ.get(LAUNCH) or "1"
