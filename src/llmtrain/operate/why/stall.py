"""How long a run has been silent, and whether the hearts of its ranks beat. Heartbeats lie on the runs volume: to read
them takes a pod and some seconds, so they are asked for only where nothing else explains the silence."""

import json
import time
from typing import Any

from llmtrain.errors import LlmtrainError
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch.pod_scripts.file_server import ANY
from llmtrain.operate.fetch.reader import FileRequest, Reader, reader_pod
from llmtrain.operate.logs.pod_log import split_time
from llmtrain.operate.status.container_exits import age_of
from llmtrain.operate.why.snapshot import Snapshot, Stall

WATCH_SEC = 6.0  # three beats
_FOLDER = "heartbeats/"


def quiet_sec(cluster: Cluster, snapshot: Snapshot) -> float:
    """Since rank 0 said something; 0 where that cannot be told."""
    first = next((pod for pod, _ in snapshot.pods if pod.index == 0 and pod.is_running), None)
    if first is None:
        return 0.0
    record = snapshot.record
    try:
        lines = list(cluster.log(first.name, record.namespace, record.workload.container, tail=1, timestamps=True))
    except LlmtrainError:
        return 0.0
    stamp = split_time(lines[-1])[0] if lines else ""
    return age_of(stamp) if stamp else 0.0


def watch_heartbeats(cluster: Cluster, snapshot: Snapshot, seconds: float) -> Stall:
    """Looks twice: whether a beat changes says more than its time, as clocks of machines differ."""
    try:
        with reader_pod(cluster, snapshot.record) as reader:
            before = read_beats(reader)
            time.sleep(WATCH_SEC)
            after = read_beats(reader)
    except LlmtrainError as problem:  # no right to make pods, or no room for one
        return Stall(seconds, problem=problem.what)
    return compare(seconds, snapshot.status.world_size, before, after)


def compare(
    seconds: float, world_size: int, before: dict[int, dict[str, Any]], after: dict[int, dict[str, Any]]
) -> Stall:
    if not after:
        return Stall(seconds, problem="the run has written none yet.")
    dead = [rank for rank in range(world_size) if rank not in after or _same(before, after, rank, "beat")]
    moving = [rank for rank in after if not _same(before, after, rank, "progress")]
    return Stall(seconds, dead, moving, {rank: int(beat.get("step") or 0) for rank, beat in after.items()})


def _same(before: dict[int, dict[str, Any]], after: dict[int, dict[str, Any]], rank: int, name: str) -> bool:
    return before.get(rank, {}).get(name) == after[rank].get(name)


def read_beats(reader: Reader) -> dict[int, dict[str, Any]]:
    """The last beat of each rank of the newest generation."""
    paths = [file.path for file in reader.files(_FOLDER) if file.path.startswith(f"{_FOLDER}rank-")]
    beats = []
    for _, blocks in reader.read_many([FileRequest(path, 0, ANY) for path in paths]):
        try:
            beat = json.loads(b"".join(blocks))
        except ValueError:  # just being replaced
            continue
        if isinstance(beat, dict) and isinstance(beat.get("rank"), int):
            beats.append(beat)
    newest = max((beat.get("generation") or 0 for beat in beats), default=0)
    return {beat["rank"]: beat for beat in beats if (beat.get("generation") or 0) == newest}
