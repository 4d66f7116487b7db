"""Detects stalled runs: the age of the log of rank 0, and the heartbeats of all ranks. Heartbeats are on the runs
volume; reading them takes a pod and some seconds, so they are read only if the log is old or unreadable."""

import json
import time
from typing import Any

from llmtrain.errors import LlmtrainError
from llmtrain.kubernetes.server_clock import seconds_since
from llmtrain.launch.pod_scripts.file_server import ANY
from llmtrain.operate.fetch.reader import FileRequest, Reader, reader_pod
from llmtrain.operate.logs.pod_log import split_time
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.why.snapshot import Snapshot, Stall

WATCH_SEC = 6.0  # three heartbeats
POLL_SEC = 2.0
MAX_WATCH_SEC = 30.0
_DIRECTORY = "heartbeats/"
Heartbeats = dict[int, dict[str, Any]]
"""Rank -> its last heartbeat."""


def log_age_sec(run: ObservedRun, snapshot: Snapshot) -> float | None:
    """Age of the last log line of rank 0; 0 if there is none yet, None if the log cannot be read."""
    running = [pod for pod, _ in snapshot.pods if pod.index == 0 and pod.is_running]
    if not running:
        return 0.0
    container = run.record.kind.container
    try:
        lines = list(run.cluster.log(running[0].name, run.namespace, container, tail=1, timestamps=True))
    except LlmtrainError:  # not allowed to read it, or the node does not respond
        return None
    if not lines:
        return 0.0
    stamp, _ = split_time(lines[-1])
    return seconds_since(stamp) if stamp else 0.0


def watch_heartbeats(run: ObservedRun, snapshot: Snapshot, log_age: float | None, stall_after_sec: float) -> Stall:
    """Reads the heartbeats until a rank advances, and compares them: clocks of nodes differ, so their time stamps are
    not used. Without the age of the log as a second sign it waits longer before it reports a hung rank."""
    watch_sec = WATCH_SEC if log_age is not None else min(max(stall_after_sec, WATCH_SEC), MAX_WATCH_SEC)
    try:
        with reader_pod(run) as reader:
            before = read_heartbeats(reader)
            deadline = time.monotonic() + watch_sec
            while True:
                time.sleep(POLL_SEC)
                stall = compare_heartbeats(log_age, snapshot.status.world_size, before, read_heartbeats(reader))
                if stall.error or stall.advancing_ranks or time.monotonic() >= deadline:
                    return stall
    except LlmtrainError as error:  # not allowed to create pods, or the pod is unschedulable
        return Stall(log_age, error=error.what)


def compare_heartbeats(seconds: float | None, world_size: int, before: Heartbeats, after: Heartbeats) -> Stall:
    if not after:
        return Stall(seconds, error="the run has not written any yet.")
    silent = []
    for rank in range(world_size):
        if rank not in after or _is_same(before, after, rank, "beat"):
            silent.append(rank)
    advancing = [rank for rank in after if not _is_same(before, after, rank, "progress")]
    steps = {rank: int(heartbeat.get("step") or 0) for rank, heartbeat in after.items()}
    return Stall(seconds, silent, advancing, steps)


def _is_same(before: Heartbeats, after: Heartbeats, rank: int, name: str) -> bool:
    return before.get(rank, {}).get(name) == after[rank].get(name)


def read_heartbeats(reader: Reader) -> Heartbeats:
    """Heartbeats of the ranks of the newest generation."""
    paths = [file.path for file in reader.files(_DIRECTORY) if file.path.startswith(f"{_DIRECTORY}rank-")]
    heartbeats = []
    for _, blocks in reader.read_many([FileRequest(path, 0, ANY) for path in paths]):
        try:
            heartbeat = json.loads(b"".join(blocks))
        except ValueError:  # being replaced
            continue
        if isinstance(heartbeat, dict) and isinstance(heartbeat.get("rank"), int):
            heartbeats.append(heartbeat)
    newest = max(map(_generation, heartbeats), default=0)
    # Earlier generations leave the files of ranks that a smaller one does not have.
    return {each["rank"]: each for each in heartbeats if _generation(each) == newest}


def _generation(heartbeat: dict[str, Any]) -> int:
    return heartbeat.get("generation") or 0
