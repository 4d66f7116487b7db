"""heartbeats/rank-K.json: where each process of a run is, for `status` and for whoever wonders which rank is silent.

A beat is written every few seconds by a thread, so it goes on while a process waits, and ends when it is stopped or
dead. Its `beat` counts up: whether it changes says more than its time, as clocks of machines differ.
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

from llmtrain.files import read_json, write_json

Beat = dict[str, Any]
_GENERATION = "generation.json"
_LAST_START = "last-start.json"


class Heartbeat:
    def __init__(self, folder: Path, rank: int, generation: int) -> None:
        self._path = folder / f"rank-{rank}.json"
        self._generation = generation
        self._fixed = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "generation": generation}
        self._beat = 0

    def write(self, step: int, progress: int) -> None:
        """Not synced: a beat is worth nothing after a power cut. Storage that fails for a moment is no reason to
        stop. Once a newer generation has begun, nothing more is written."""
        if _current(self._path.parent) > self._generation:
            return
        self._beat += 1
        beat = {**self._fixed, "beat": self._beat, "step": step, "progress": progress, "time": round(time.time(), 3)}
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _write(self._path, beat)


def read_heartbeats(folder: Path) -> dict[int, Beat]:
    """The last beat of every rank of the newest generation."""
    beats = [beat for path in folder.glob("rank-*.json") if isinstance(beat := read_json(path), dict)]
    newest = _current(folder)
    own = (beat for beat in beats if beat.get("generation") == newest or not newest)
    return {beat["rank"]: beat for beat in own if isinstance(beat.get("rank"), int)}


def announce_start(folder: Path, node: int) -> str:
    """Say that this node starts (or starts again) its part of the run, before it waits for the others. Those who are
    still in an earlier start, waiting for whom it replaces, then need not wait until they give up. Returns what tells
    this start from others: a random word, and when it was written, by the clock of the file system. Of a run that is
    not there yet nothing is written: nobody can be in an earlier start of it."""
    if not folder.parent.is_dir():
        return "- 0"
    word, path = secrets.token_hex(8), folder / _LAST_START
    written_at = 0
    with contextlib.suppress(OSError):  # then the others wait for their timeout
        folder.mkdir(exist_ok=True)
        _write(path, {"node": node, "start": word})
        written_at = path.stat().st_mtime_ns
    return f"{word} {written_at}"


def started_again(folder: Path, starts: Iterable[str]) -> tuple[int, str] | None:
    """The node that has started since, and its word, where it is none of these starts. One file for all nodes, as every
    process looks at it every few seconds; a file system that shows an older one for a while changes nothing."""
    words, times = zip(*(start.split() for start in starts), strict=True)
    try:
        is_newer = (folder / _LAST_START).stat().st_mtime_ns > max(int(time_ns) for time_ns in times)
    except OSError:
        return None
    found = read_json(folder / _LAST_START) if is_newer else None
    node, word = (found.get("node"), found.get("start")) if isinstance(found, dict) else (None, None)
    if not isinstance(node, int) or not isinstance(word, str) or word in words:
        return None
    return node, word


def clear_heartbeats(folder: Path, generation: int) -> None:
    """A new generation begins: forget the ranks of the earlier one, of which there may have been more."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / _GENERATION, {"generation": generation})
    for path in folder.glob("rank-*.json"):
        path.unlink(missing_ok=True)


def _write(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all, but not synced."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)


def _current(folder: Path) -> int:
    value = read_json(folder / _GENERATION)
    number = value.get("generation") if isinstance(value, dict) else None
    return number if isinstance(number, int) else 0
