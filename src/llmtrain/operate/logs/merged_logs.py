"""What all nodes of a run say, in one stream: from the cluster while there are pods, then from the runs volume."""

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
from llmtrain.operate.fetch.reader import Reader, Wanted, reader_pod
from llmtrain.operate.logs.pod_log import AWAY_LIMIT_SEC, DRAIN_SEC, LogLine, PodLogs, split_time
from llmtrain.operate.status.pods import by_index, container_state, current_container, pod_statuses
from llmtrain.operate.status.progress import RunProgress, split_line
from llmtrain.operate.status.run_status import find_job, find_pods
from llmtrain.operate.status.state import ENDED, Seen, find_state

POLL_SEC = 2.0
BLOCK_BYTES = 2**14  # of each rank's log in memory at once
_WRITTEN_AT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
_RANK_MARK = re.compile(r"\[rank (\d+)\] ")
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
    """Lines of all nodes, or of the one that has `rank`, in the order they were written.
    `previous`: also of containers and pods that were replaced. `tail`: the last lines of each node. Where the pods are
    gone, the files that the run keeps on its volume."""
    index = node_of(record, rank)
    pods = [pod for i, own in by_index(record, find_pods(cluster, record)).items() if index in (None, i) for pod in own]
    if follow and (pods or find_job(cluster, record) is not None):
        yield from _followed(cluster, record, index, tail)
    elif pods:
        yield from _written(cluster, record, index, pods, tail, previous)
    else:
        yield from _kept(cluster, record, rank, tail)


def line_as_dict(line: LogLine, processes_per_node: int) -> dict[str, Any]:
    """A line for programs. `data` has the fields of a line that is JSON, and what a line about training says."""
    written_at = _WRITTEN_AT.match(line.text) if line.pod is None else None
    text = line.text[written_at.end() + 1 :] if written_at else line.text
    tag, message = split_line(text)
    data = _json_object(text)
    if data is None:
        said = {name: getattr(RunProgress().after(text), name) for name in _TRAINING_FIELDS}
        data = {name: value for name, value in said.items() if value is not None and value == value}  # not NaN
    rank = line.rank if line.rank is not None else data.get("rank")
    if rank is None and processes_per_node == 1:
        rank = line.index
    elif rank is None and (found := _RANK_MARK.match(message)):
        rank = int(found[1])
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
        value = json.loads(text, parse_constant=lambda _: None)  # NaN is no JSON
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _iso_time(time: str) -> str | None:
    """JSON lines on the volume have seconds since 1970; the others have their time as it is."""
    try:
        return datetime.fromtimestamp(float(time), UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return time or None


def node_of(record: Record, rank: int | None) -> int | None:
    """The node that has a rank: its processes share one log."""
    if rank is None:
        return None
    launch = record.config.launch
    world = launch.node_range[1] * launch.processes_per_node
    if not 0 <= rank < world:
        raise UsageError(f"Run '{record.run_id}' has no rank {rank}: its ranks are 0 to {world - 1}.")
    return rank // launch.processes_per_node


def _written(
    cluster: Cluster, record: Record, index: int | None, pods: list[Object], tail: int | None, previous: bool
) -> Iterator[LogLine]:
    """What is there by now, merged by time. A pod that cannot be read (its machine is lost) is the error, after all
    that can be."""
    problems: list[LlmtrainError] = []
    nodes = {node: own for node, own in by_index(record, pods).items() if index in (None, node)}
    streams = [
        _last(_node_lines(cluster, record, node, own if previous else own[-1:], tail, previous, problems), tail)
        for node, own in nodes.items()
    ]
    yield from heapq.merge(*streams, key=lambda line: line.time)
    if problems:
        raise problems[0]


def _last(lines: Iterable[LogLine], count: int | None) -> Iterable[LogLine]:
    return lines if count is None else deque(lines, maxlen=count)


def _node_lines(
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
    had_another = previous and container_state(pod, container)[2] > 0
    for is_previous in (True, False) if had_another else (False,):
        at = ""
        for line in cluster.log(
            pod["metadata"]["name"], record.namespace, name, tail=tail, previous=is_previous, timestamps=True
        ):
            stamp, text = split_time(line)
            at = stamp or at
            yield LogLine(index, at, text, pod["metadata"]["name"])


def _followed(cluster: Cluster, record: Record, index: int | None, tail: int | None) -> Iterator[LogLine]:
    """As they come, until the run has ended. Pods that are made meanwhile join in."""
    logs = PodLogs(cluster, record, index, tail)
    nodes = range(record.config.launch.node_range[0]) if index is None else (index,)
    said_last: dict[int, RunProgress] = {}
    answered_at, ended_at = time.monotonic(), None
    try:
        while True:
            now = time.monotonic()
            try:
                job, pods = find_job(cluster, record), find_pods(cluster, record)
                logs.update(pods)
                answered_at = now
                if _has_ended(record, job, pods):
                    ended_at = ended_at or now
            except ClusterError:
                if now - answered_at > AWAY_LIMIT_SEC:
                    raise
            if all(_is_idle(record, said_last.get(node)) for node in nodes):
                return
            if ended_at and (logs.is_drained or now - ended_at > DRAIN_SEC):
                return
            while (left := now + (POLL_SEC if not ended_at else 0.2) - time.monotonic()) > 0:
                for line in logs.lines(wait_sec=left):
                    said_last[line.index] = RunProgress().after(line.text)
                    yield line
    finally:
        logs.close()


def _has_ended(record: Record, job: Object | None, pods: list[Object]) -> bool:
    return find_state(record, Seen(job, pod_statuses(record, pods))) in ENDED


def _is_idle(record: Record, said_last: RunProgress | None) -> bool:
    """A node of a StatefulSet that has ended, and waits to be removed: nothing more will come."""
    is_set = record.config.launch.kind == "stateful_set"
    return is_set and said_last is not None and said_last.idle_code is not None


def _kept(cluster: Cluster, record: Record, rank: int | None, tail: int | None) -> Iterator[LogLine]:
    """The files under logs/ of the run directory, which every process writes for itself."""
    with reader_pod(cluster, record) as reader:
        files = {_rank_of(file.path): file.path for file in reader.files("logs/")}
        if rank is not None:
            files = {own: path for own, path in files.items() if own == rank}
        if not files:
            whose = "" if rank is None else f" of rank {rank}"
            raise UsageError(
                f"The pods of run '{record.run_id}' are gone, and its directory on the volume has no log{whose}.",
                remedy="logging.log_to_file keeps logs there; a run that never started has none.",
            )
        count = record.config.launch.processes_per_node
        with TemporaryFile() as spool:
            parts = _fetch_all(reader, sorted(files.values()), spool)
            streams = [
                _last(_file_lines(own // count, own, _text_lines(_blocks(spool, *parts[path]))), tail)
                for own, path in sorted(files.items())
                if path in parts
            ]
            yield from heapq.merge(*streams, key=lambda line: line.time)


def _fetch_all(reader: Reader, paths: list[str], spool: BinaryIO) -> dict[str, tuple[int, int]]:
    """All files one after the other into one file here: path -> where it begins and ends there. To merge them over the
    line would take as many processes in the reader pod at once as there are ranks, more than it has memory for."""
    parts = {}
    for sent, blocks in reader.read_many([Wanted(path, 0, ANY) for path in paths]):
        begin = spool.tell()
        for block in blocks:
            spool.write(block)
        parts[sent.path] = (begin, spool.tell())
    spool.flush()
    return parts


def _blocks(spool: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    """By position: all ranks' lines are read from one open file."""
    while begin < end:
        block = os.pread(spool.fileno(), min(BLOCK_BYTES, end - begin), begin)
        if not block:
            return
        begin += len(block)
        yield block


def _rank_of(path: str) -> int:
    """logs/rank-3.log; rank 0's has a name that the config gives."""
    found = _RANK_FILE.search(path)
    return int(found[1]) if found else 0


def _file_lines(index: int, rank: int, lines: Iterable[str]) -> Iterator[LogLine]:
    at = ""
    for line in lines:
        at = _written_at(line) or at
        yield LogLine(index, at, line, rank=rank)


def _written_at(line: str) -> str | None:
    """When a line of a log file was written, as a text that sorts."""
    if found := _WRITTEN_AT.match(line):
        return found[0]
    if not line.startswith("{"):
        return None
    try:
        return f"{float(json.loads(line)['time']):017.3f}"
    except (ValueError, KeyError, TypeError):
        return None


def _text_lines(pieces: Iterable[bytes]) -> Iterator[str]:
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in whole)
    if rest:
        yield rest.decode("utf-8", "replace")
