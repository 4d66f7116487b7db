"""heartbeats/rank-K.json: progress of each process of a run, for `status`, `why` and the watchdog.

A thread writes a heartbeat every few seconds, also while the process waits; heartbeats end when the process is
suspended or dead. Readers compare the counter `beat`, not the time, as clocks of machines differ.
"""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmtrain.core.files import read_json, write_json

Beat = dict[str, Any]
_GENERATION = "generation.json"
_LAST_START = "last-start.json"


class Heartbeat:
    def __init__(self, directory: Path, rank: int, generation: int) -> None:
        self._path = directory / f"rank-{rank}.json"
        self._generation = generation
        self._fixed = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "generation": generation}
        self._beat = 0

    def write(self, step: int, progress: int) -> None:
        """Write a heartbeat, unless a newer generation has begun. It is not synced, and storage errors are ignored."""
        if _current(self._path.parent) > self._generation:
            return
        self._beat += 1
        beat = {**self._fixed, "beat": self._beat, "step": step, "progress": progress, "time": round(time.time(), 3)}
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _write(self._path, beat)


def read_heartbeats(directory: Path) -> dict[int, Beat]:
    """The last heartbeat of every rank of the newest generation."""
    newest = _current(directory)
    beats = {}
    for path in directory.glob("rank-*.json"):
        beat = read_json(path)
        if not isinstance(beat, dict) or not isinstance(beat.get("rank"), int):
            continue  # damaged
        if not newest or beat.get("generation") == newest:
            beats[beat["rank"]] = beat
    return beats


def announce_start(directory: Path, node_rank: int) -> str:
    """Record that this node starts, before it waits for the others. Peers that still wait for the node that it replaces
    then stop without waiting for their timeout. Returns the id of this start: a random token, and its time by the clock
    of the file system. Writes nothing if the run does not exist yet: then no peer can be in an earlier start."""
    if not directory.parent.is_dir():
        return "- 0"
    token = secrets.token_hex(8)
    path = directory / _LAST_START
    written_at = 0
    with contextlib.suppress(OSError):  # without the file, peers wait for their timeout
        directory.mkdir(exist_ok=True)
        _write(path, {"node": node_rank, "start": token})
        written_at = path.stat().st_mtime_ns
    return f"{token} {written_at}"


def started_again(directory: Path, starts: Iterable[str]) -> tuple[int, str] | None:
    """The rank and token of a node that has started since, unless it is one of these starts. All nodes share one file,
    because every process polls it; a file system that shows an old version for a while does no harm."""
    tokens, times = zip(*(start.split() for start in starts), strict=True)
    try:
        is_newer = (directory / _LAST_START).stat().st_mtime_ns > max(int(time_ns) for time_ns in times)
    except OSError:
        return None
    last = read_json(directory / _LAST_START) if is_newer else None
    if not isinstance(last, dict):
        return None
    node_rank = last.get("node")
    token = last.get("start")
    if not isinstance(node_rank, int) or not isinstance(token, str) or token in tokens:
        return None
    return node_rank, token


def clear_heartbeats(directory: Path, generation: int) -> None:
    """Begin a new generation: remove the heartbeats of the earlier one, which may have had more ranks."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / _GENERATION, {"generation": generation})
    for path in directory.glob("rank-*.json"):
        path.unlink(missing_ok=True)


def _write(path: Path, value: dict[str, Any]) -> None:
    """Atomic, but not synced."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)


def _current(directory: Path) -> int:
    value = read_json(directory / _GENERATION)
    number = value.get("generation") if isinstance(value, dict) else None
    return number if isinstance(number, int) else 0
