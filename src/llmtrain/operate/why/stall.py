"""Detects stalled runs: the age of the log of rank 0, and the heartbeats of all ranks. Heartbeats are on the runs
volume; reading them takes a pod and some seconds, so they are read only if the log is old or unreadable."""

import json
import time
from typing import Any

from llmtrain.errors import LlmtrainError
from llmtrain.kubernetes.client import Cluster
from llmtrain.kubernetes.server_clock import seconds_since
from llmtrain.launch.pod_scripts.file_server import ANY
from llmtrain.operate.fetch.reader import FileRequest, Reader, reader_pod
from llmtrain.operate.logs.pod_log import split_time
from llmtrain.operate.why.snapshot import Snapshot, Stall

WATCH_SEC = 6.0  # three heartbeats
POLL_SEC = 2.0
MAX_WATCH_SEC = 30.0
_DIRECTORY = "heartbeats/"
Heartbeats = dict[int, dict[str, Any]]
"""Rank -> its last heartbeat."""


def log_age_sec(cluster: Cluster, snapshot: Snapshot) -> float | None:
    """Age of the last log line of rank 0; 0 if there is none yet, None if the log cannot be read."""
    pod0 = next((pod for pod, _ in snapshot.pods if pod.index == 0 and pod.is_running), None)
    if pod0 is None:
        return 0.0
    record = snapshot.record
    try:
        lines = list(cluster.log(pod0.name, record.namespace, record.workload.container, tail=1, timestamps=True))
    except LlmtrainError:  # not allowed to read it, or the node does not respond
        return None
    stamp = split_time(lines[-1])[0] if lines else ""
    return seconds_since(stamp) if stamp else 0.0


def watch_heartbeats(cluster: Cluster, snapshot: Snapshot, log_age: float | None, stall_after_sec: float) -> Stall:
    """Reads the heartbeats until a rank advances, and compares them: clocks of nodes differ, so their time stamps are
    not used. Without the age of the log as a second sign it waits longer before it reports a silent rank."""
    watch_sec = WATCH_SEC if log_age is not None else min(max(stall_after_sec, WATCH_SEC), MAX_WATCH_SEC)
    try:
        with reader_pod(cluster, snapshot.record) as reader:
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
    silent = [rank for rank in range(world_size) if rank not in after or _is_same(before, after, rank, "beat")]
    advancing = [rank for rank in after if not _is_same(before, after, rank, "progress")]
    return Stall(seconds, silent, advancing, {rank: int(each.get("step") or 0) for rank, each in after.items()})


def _is_same(before: Heartbeats, after: Heartbeats, rank: int, name: str) -> bool:
    return before.get(rank, {}).get(name) == after[rank].get(name)


def read_heartbeats(reader: Reader) -> Heartbeats:
    """Of the ranks of the newest generation."""
    paths = [file.path for file in reader.files(_DIRECTORY) if file.path.startswith(f"{_DIRECTORY}rank-")]
    heartbeats = []
    for _, blocks in reader.read_many([FileRequest(path, 0, ANY) for path in paths]):
        try:
            heartbeat = json.loads(b"".join(blocks))
        except ValueError:  # being replaced
            continue
        if isinstance(heartbeat, dict) and isinstance(heartbeat.get("rank"), int):
            heartbeats.append(heartbeat)
    newest = max((each.get("generation") or 0 for each in heartbeats), default=0)
    return {each["rank"]: each for each in heartbeats if (each.get("generation") or 0) == newest}
