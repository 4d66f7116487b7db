"""Crashes of a user's own command, counted on the runs volume where the platform sets no limit: a PyTorchJob makes a
pod anew, and a StatefulSet starts it again, however often it has ended with a crash.

llmtrain's own trainer counts its crashes itself (runs/generations.py), by its checkpoints. Of another program nothing
is known but how long it ran: one that came far begins a new row.
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

FAR_SEC = 3600.0
_NO_CRASH = (0, 64, 65, JoinError.exit_code, Interrupted.exit_code)


def count_crash(code: int, was_told: bool, ran_sec: float, environ: Mapping[str, str] = os.environ) -> None:
    """Count an end of the command on this node that is a crash. Raises TrainingFailed at the third in a row."""
    folder, launch = environ.get(RUN_DIR), environ.get(LAUNCH)
    if not folder or not launch or was_told or code in _NO_CRASH:
        return
    file = Path(folder) / f"crashes-{re.sub(r'[^a-zA-Z0-9-]', '-', socket.gethostname())}.json"
    before = read_json(file)
    is_in_a_row = isinstance(before, dict) and before.get("launch") == launch and ran_sec < FAR_SEC
    last = before.get("crashes") if isinstance(before, dict) and is_in_a_row else 0
    crashes = (last if isinstance(last, int) else 0) + 1
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"launch": launch, "crashes": crashes, "exit_code": code})
    except OSError as problem:
        warn("DDP", f"{file} cannot be written ({problem.strerror}): crashes are not counted")
    if crashes >= MAX_CRASHES:
        raise TrainingFailed(
            f"The command crashed {crashes} times in a row on this node, the last time with exit code {code}.",
            remedy=f"Its output says why. When the cause is gone: llmtrain resume {Path(folder).name}",
            reason="gave_up",
        )
