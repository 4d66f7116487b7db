"""heartbeats/rank-K.json: where each process of a run is, for `status` and for whoever wonders which rank is silent.

A beat is written every few seconds by a thread, so it goes on while a process waits, and ends when it is stopped or
dead. Its `beat` counts up: whether it changes says more than its time, as clocks of machines differ.
"""

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from llmtrain.runs.atomic import read_json

Beat = dict[str, Any]


class Heartbeat:
    def __init__(self, folder: Path, rank: int, generation: int) -> None:
        self._path = folder / f"rank-{rank}.json"
        self._fixed = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "generation": generation}
        self._beat = 0

    def write(self, step: int, progress: int) -> None:
        """Not synced: a beat is worth nothing after a power cut. Storage that fails for a moment is no reason to
        stop. A newer generation's beat is left alone."""
        there = read_json(self._path)
        if isinstance(there, dict) and there.get("generation", 0) > self._fixed["generation"]:
            return
        self._beat += 1
        beat = {**self._fixed, "beat": self._beat, "step": step, "progress": progress, "time": round(time.time(), 3)}
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(beat), encoding="utf-8")
            temporary.replace(self._path)


def read_heartbeats(folder: Path) -> dict[int, Beat]:
    """The last beat of every rank."""
    beats = (read_json(path) for path in folder.glob("rank-*.json"))
    return {beat["rank"]: beat for beat in beats if isinstance(beat, dict) and isinstance(beat.get("rank"), int)}


def clear_heartbeats(folder: Path) -> None:
    """Forget the ranks of an earlier generation: there may be fewer now."""
    for path in folder.glob("rank-*.json"):
        path.unlink(missing_ok=True)
