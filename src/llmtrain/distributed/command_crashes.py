"""Crashes of a user's command, counted on the runs volume: PyTorchJobs and StatefulSets restart a pod without limit.

llmtrain's trainer counts its crashes by its checkpoints (runs/generations.py). Of another program only the run time is
known: after an hour of it, the count starts from 1 again.
"""

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from llmtrain.env import LAUNCH, RUN_DIR
from llmtrain.errors import Interrupted, JoinError, TrainingFailed
from llmtrain.files import read_json, write_json
from llmtrain.logs import warn
from llmtrain.runs.generations import MAX_CRASHES

LONG_RUN_SEC = 3600.0
_NO_CRASH = (0, 64, 65, JoinError.exit_code, Interrupted.exit_code)


def count_crash(code: int, was_interrupted: bool, ran_sec: float, environ: Mapping[str, str] = os.environ) -> None:
    """Count this end of the command if it is a crash. Raises TrainingFailed at the third in a row."""
    directory, launch = environ.get(RUN_DIR), environ.get(LAUNCH)
    if not directory or not launch or was_interrupted or code in _NO_CRASH:
        return
    file = Path(directory) / f"crashes-{re.sub(r'[^a-zA-Z0-9-]', '-', socket.gethostname())}.json"
    before = read_json(file)
    is_in_a_row = isinstance(before, dict) and before.get("launch") == launch and ran_sec < LONG_RUN_SEC
    previous = before.get("crashes") if isinstance(before, dict) and is_in_a_row else 0
    crashes = (previous if isinstance(previous, int) else 0) + 1
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
