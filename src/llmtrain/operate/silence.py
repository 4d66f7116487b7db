"""How long a run has been silent, and whether the hearts of its ranks beat. Heartbeats lie on the runs volume: to read
them takes a pod and some seconds, so they are asked for only where nothing else explains the silence."""

import json
import time
from typing import Any

from llmtrain.errors import LlmtrainError
from llmtrain.launch.cluster import Cluster
from llmtrain.operate.clues import Clues, Silence
from llmtrain.operate.container_ends import age_of
from llmtrain.operate.pod_log import split_time
from llmtrain.operate.reader import Reader, Wanted, reader_pod
from llmtrain.operate.remote import ANY

WATCH_SEC = 6.0  # three beats
_FOLDER = "heartbeats/"


def quiet_sec(cluster: Cluster, clues: Clues) -> float:
    """Since rank 0 said something; 0 where that cannot be told."""
    first = next((pod for pod, _ in clues.pods if pod.index == 0 and pod.is_running), None)
    if first is None:
        return 0.0
    record = clues.record
    try:
        lines = list(cluster.log(first.name, record.namespace, record.kind.container, tail=1, timestamps=True))
    except LlmtrainError:
        return 0.0
    stamp = split_time(lines[-1])[0] if lines else ""
    return age_of(stamp) if stamp else 0.0


def watch_hearts(cluster: Cluster, clues: Clues, seconds: float) -> Silence:
    """Looks twice: whether a beat changes says more than its time, as clocks of machines differ."""
    try:
        with reader_pod(cluster, clues.record) as reader:
            before = read_beats(reader)
            time.sleep(WATCH_SEC)
            after = read_beats(reader)
    except LlmtrainError as problem:  # no right to make pods, or no room for one
        return Silence(seconds, problem=problem.what)
    return compare(seconds, clues.status.world_size, before, after)


def compare(
    seconds: float, world_size: int, before: dict[int, dict[str, Any]], after: dict[int, dict[str, Any]]
) -> Silence:
    if not after:
        return Silence(seconds, problem="the run has written none yet.")
    dead = [rank for rank in range(world_size) if rank not in after or _same(before, after, rank, "beat")]
    moving = [rank for rank in after if not _same(before, after, rank, "progress")]
    return Silence(seconds, dead, moving, {rank: int(beat.get("step") or 0) for rank, beat in after.items()})


def _same(before: dict[int, dict[str, Any]], after: dict[int, dict[str, Any]], rank: int, name: str) -> bool:
    return before.get(rank, {}).get(name) == after[rank].get(name)


def read_beats(reader: Reader) -> dict[int, dict[str, Any]]:
    """The last beat of each rank of the newest generation."""
    paths = [file.path for file in reader.files(_FOLDER) if file.path.startswith(f"{_FOLDER}rank-")]
    beats = []
    for _, blocks in reader.read_many([Wanted(path, 0, ANY) for path in paths]):
        try:
            beat = json.loads(b"".join(blocks))
        except ValueError:  # just being replaced
            continue
        if isinstance(beat, dict) and isinstance(beat.get("rank"), int):
            beats.append(beat)
    newest = max((beat.get("generation") or 0 for beat in beats), default=0)
    return {beat["rank"]: beat for beat in beats if (beat.get("generation") or 0) == newest}
