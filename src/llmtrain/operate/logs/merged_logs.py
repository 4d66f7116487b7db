"""The logs of all pods of a run in one stream: from the cluster while pods exist, otherwise from the runs volume."""

import heapq
import json
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.launch.pod_scripts.file_server import ANY
from llmtrain.launch.record import Record
from llmtrain.operate.fetch.reader import FileRequest, Reader, reader_pod
from llmtrain.operate.logs.pod_log import DRAIN_SEC, UNREACHABLE_LIMIT_SEC, LogLine, PodLogs, split_time
from llmtrain.operate.status.pods import by_index, container_state, current_container, pod_statuses
from llmtrain.operate.status.progress import RunProgress, split_line
from llmtrain.operate.status.run_status import find_job, find_pods
from llmtrain.operate.status.state import ENDED, Observation, find_state

POLL_SEC = 2.0
BLOCK_BYTES = 2**14  # read at a time from the log of each rank
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
_RANK_PREFIX = re.compile(r"\[rank (\d+)\] ")
_TRAINING_FIELDS = ("step", "max_steps", "loss", "val_loss", "tokens_per_second", "time_left")
_RANK_FILE = re.compile(r"rank-(\d+)\.log$")


def merged_logs(
    cluster: Cluster,
    record: Record,
    *,
    rank: int | None = None,
    follow: bool = False,
    tail: int | None = None,
    previous: bool = True,
) -> Iterator[LogLine]:
    """Log lines of all pods, or of the pod that runs `rank`, in the order they were written. `previous`: include
    replaced containers and pods. `tail`: only the last lines of each pod. If the pods are gone, the log files on the
    runs volume are read."""
    index = node_rank_of(record, rank)
    pods = [pod for i, own in by_index(record, find_pods(cluster, record)).items() if index in (None, i) for pod in own]
    if follow and (pods or find_job(cluster, record) is not None):
        yield from _follow(cluster, record, index, tail)
    elif pods:
        yield from _existing_lines(cluster, record, index, pods, tail, previous)
    else:
        yield from _volume_lines(cluster, record, rank, tail)


def line_as_dict(line: LogLine, processes_per_node: int) -> dict[str, Any]:
    """The JSON form of a line. `data` has the fields of a JSON line, or the values of a training line."""
    timestamp = _TIMESTAMP.match(line.text) if line.pod is None else None
    text = line.text[timestamp.end() + 1 :] if timestamp else line.text
    tag, message = split_line(text)
    data = _json_object(text)
    if data is None:
        values = {name: getattr(RunProgress().after(text), name) for name in _TRAINING_FIELDS}
        data = {name: value for name, value in values.items() if value is not None and value == value}  # not NaN
    rank = line.rank if line.rank is not None else data.get("rank")
    if rank is None and processes_per_node == 1:
        rank = line.index
    elif rank is None and (prefix := _RANK_PREFIX.match(message)):
        rank = int(prefix[1])
    return {
        "pod": line.pod,
        "node_rank": line.index,
        "rank": rank,
        "time": _iso_time(line.time),
        "tag": tag,
        "text": text,
        "data": data,
    }


def _json_object(text: str) -> dict[str, Any] | None:
    if not text.startswith("{"):
        return None
    try:
        value = json.loads(text, parse_constant=lambda _: None)  # NaN is not valid JSON
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _iso_time(time: str) -> str | None:
    """JSON lines on the volume have Unix time, which is converted; other times are returned unchanged."""
    try:
        return datetime.fromtimestamp(float(time), UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return time or None


def node_rank_of(record: Record, rank: int | None) -> int | None:
    """Node rank of the pod that runs a process: all processes of a pod share one log."""
    if rank is None:
        return None
    launch = record.config.launch
    world = launch.node_range[1] * launch.processes_per_node
    if not 0 <= rank < world:
        raise UsageError(f"--rank must be 0 to {world - 1} for run '{record.run_id}', got {rank}.")
    return rank // launch.processes_per_node


def _existing_lines(
    cluster: Cluster, record: Record, index: int | None, pods: list[Object], tail: int | None, previous: bool
) -> Iterator[LogLine]:
    """The lines written so far, merged by time. If a pod cannot be read (its node is lost), the error is raised after
    the lines of the others."""
    problems: list[LlmtrainError] = []
    selected = {rank: own for rank, own in by_index(record, pods).items() if index in (None, rank)}
    streams = [
        _last(_replica_lines(cluster, record, rank, own if previous else own[-1:], tail, previous, problems), tail)
        for rank, own in selected.items()
    ]
    yield from heapq.merge(*streams, key=lambda line: line.time)
    if problems:
        raise problems[0]


def _last(lines: Iterable[LogLine], count: int | None) -> Iterable[LogLine]:
    return lines if count is None else deque(lines, maxlen=count)


def _replica_lines(
    cluster: Cluster,
    record: Record,
    index: int,
    pods: list[Object],
    tail: int | None,
    previous: bool,
    problems: list[LlmtrainError],
) -> Iterator[LogLine]:
    for pod in pods:
        try:
            yield from _pod_lines(cluster, record, index, pod, tail, previous)
        except LlmtrainError as problem:
            problems.append(problem)


def _pod_lines(
    cluster: Cluster, record: Record, index: int, pod: Object, tail: int | None, previous: bool
) -> Iterator[LogLine]:
    container = record.workload.container
    name = current_container(pod, container).get("name", container)
    has_restarted = previous and container_state(pod, container)[2] > 0
    for is_previous in (True, False) if has_restarted else (False,):
        last_stamp = ""
        for line in cluster.log(
            pod["metadata"]["name"], record.namespace, name, tail=tail, previous=is_previous, timestamps=True
        ):
            stamp, text = split_time(line)
            last_stamp = stamp or last_stamp
            yield LogLine(index, last_stamp, text, pod["metadata"]["name"])


def _follow(cluster: Cluster, record: Record, index: int | None, tail: int | None) -> Iterator[LogLine]:
    """Lines as they are written, until the run ends. New pods are followed too."""
    logs = PodLogs(cluster, record, index, tail)
    ranks = range(record.config.launch.node_range[0]) if index is None else (index,)
    last_progress: dict[int, RunProgress] = {}
    reached_at, ended_at = time.monotonic(), None
    try:
        while True:
            now = time.monotonic()
            try:
                job, pods = find_job(cluster, record), find_pods(cluster, record)
                logs.update(pods)
                reached_at = now
                if _has_ended(record, job, pods):
                    ended_at = ended_at or now
            except ClusterError:
                if now - reached_at > UNREACHABLE_LIMIT_SEC:
                    raise
            if all(_is_idle(record, last_progress.get(rank)) for rank in ranks):
                return
            if ended_at and (logs.is_drained or now - ended_at > DRAIN_SEC):
                return
            while (remaining := now + (POLL_SEC if not ended_at else 0.2) - time.monotonic()) > 0:
                for line in logs.lines(wait_sec=remaining):
                    last_progress[line.index] = RunProgress().after(line.text)
                    yield line
    finally:
        logs.close()


def _has_ended(record: Record, job: Object | None, pods: list[Object]) -> bool:
    return find_state(record, Observation(job, pod_statuses(record, pods))) in ENDED


def _is_idle(record: Record, last: RunProgress | None) -> bool:
    """Whether a pod of a StatefulSet has ended and waits to be deleted: it will write no more lines."""
    is_stateful_set = record.config.launch.kind == "stateful_set"
    return is_stateful_set and last is not None and last.idle_code is not None


def _volume_lines(cluster: Cluster, record: Record, rank: int | None, tail: int | None) -> Iterator[LogLine]:
    """Lines of the files under logs/ of the run directory, one file per process."""
    with reader_pod(cluster, record) as reader:
        files = {_rank_of(file.path): file.path for file in reader.files("logs/")}
        if rank is not None:
            files = {own: path for own, path in files.items() if own == rank}
        if not files:
            which = "" if rank is None else f" of rank {rank}"
            raise UsageError(
                f"The pods of run '{record.run_id}' are gone, and its run directory has no log file{which}.",
                remedy="Set logging.log_to_file to keep logs on the volume. A run that never started has none.",
            )
        count = record.config.launch.processes_per_node
        with TemporaryFile() as spool:
            spans = _fetch_all(reader, sorted(files.values()), spool)
            streams = [
                _last(_file_lines(own // count, own, _text_lines(_blocks(spool, *spans[path]))), tail)
                for own, path in sorted(files.items())
                if path in spans
            ]
            yield from heapq.merge(*streams, key=lambda line: line.time)


def _fetch_all(reader: Reader, paths: list[str], spool: BinaryIO) -> dict[str, tuple[int, int]]:
    """Append all files to one local file: path -> (begin, end) in it. Merging them while reading would need one process
    per rank in the reader pod, more than it has memory for."""
    spans = {}
    for sent, blocks in reader.read_many([FileRequest(path, 0, ANY) for path in paths]):
        begin = spool.tell()
        for block in blocks:
            spool.write(block)
        spans[sent.path] = (begin, spool.tell())
    spool.flush()
    return spans


def _blocks(spool: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    """Read by position: the streams of all ranks share one open file."""
    while begin < end:
        block = os.pread(spool.fileno(), min(BLOCK_BYTES, end - begin), begin)
        if not block:
            return
        begin += len(block)
        yield block


def _rank_of(path: str) -> int:
    """3 for logs/rank-3.log; 0 for the file whose name is set in the config."""
    match = _RANK_FILE.search(path)
    return int(match[1]) if match else 0


def _file_lines(index: int, rank: int, lines: Iterable[str]) -> Iterator[LogLine]:
    last_time = ""
    for line in lines:
        last_time = _time_of(line) or last_time
        yield LogLine(index, last_time, line, rank=rank)


def _time_of(line: str) -> str | None:
    """When a line of a log file was written, as sortable text."""
    if match := _TIMESTAMP.match(line):
        return match[0]
    if not line.startswith("{"):
        return None
    try:
        return f"{float(json.loads(line)['time']):017.3f}"
    except (ValueError, KeyError, TypeError):
        return None


def _text_lines(blocks: Iterable[bytes]) -> Iterator[str]:
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in lines)
    if rest:
        yield rest.decode("utf-8", "replace")
