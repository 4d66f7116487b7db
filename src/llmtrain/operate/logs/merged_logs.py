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

from llmtrain.core.logs import split_line
from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.kubernetes.client import Object
from llmtrain.launch.pod_scripts.file_server import ANY
from llmtrain.launch.record import Record
from llmtrain.operate.fetch.reader import FileRequest, Reader, reader_pod
from llmtrain.operate.logs.pod_log import DRAIN_SEC, UNREACHABLE_LIMIT_SEC, LogLine, PodLogs, split_time
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.pods import container_state, current_container
from llmtrain.operate.status.progress import RunProgress
from llmtrain.operate.status.state import Observation, find_state

POLL_SEC = 2.0
DRAIN_POLL_SEC = 0.2  # once the run has ended: the user waits for the command to return
BLOCK_BYTES = 2**14  # read at a time from the log of each rank
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
_RANK_PREFIX = re.compile(r"\[rank (\d+)\] ")
_TRAINING_FIELDS = ("step", "max_steps", "loss", "val_loss", "tokens_per_second", "time_left")
_RANK_FILE = re.compile(r"rank-(\d+)\.log$")


def merged_logs(
    run: ObservedRun,
    *,
    rank: int | None = None,
    follow: bool = False,
    tail: int | None = None,
    previous: bool = True,
) -> Iterator[LogLine]:
    """Log lines of all pods, or of the pod that runs `rank`, in the order they were written; with `follow` as they
    arrive. `previous`: include replaced containers and pods. `tail`: only the last lines of each pod. If the pods are
    gone, the log files on the runs volume are read."""
    index = node_rank_of(run.record, rank)
    pods = run.pods_by_index
    if index is not None:
        pods = {index: pods[index]} if index in pods else {}
    if follow and (pods or run.job is not None):
        yield from _follow(run, index, tail)
    elif pods:
        yield from _existing_lines(run, pods, tail, previous)
    else:
        yield from _volume_lines(run, rank, tail)


def line_as_dict(line: LogLine, processes_per_node: int) -> dict[str, Any]:
    """The JSON form of a line. `data` has the fields of a JSON line, or the values of a training line."""
    text = line.text
    timestamp = _TIMESTAMP.match(text)
    if line.pod is None and timestamp:  # a line of a log file starts with its time
        text = text[timestamp.end() + 1 :]
    tag, message = split_line(text)
    data = _json_object(text)
    if data is None:
        data = _training_values(text)
    return {
        "pod": line.pod,
        "node_rank": line.index,
        "rank": _rank_in(line, data, message, processes_per_node),
        "time": _iso_time(line.time),
        "tag": tag,
        "text": text,
        "data": data,
    }


def _training_values(text: str) -> dict[str, Any]:
    progress = RunProgress().after(text)
    values = {}
    for name in _TRAINING_FIELDS:
        value = getattr(progress, name)
        if value is not None and value == value:  # NaN, which is not valid JSON, is not equal to itself
            values[name] = value
    return values


def _rank_in(line: LogLine, data: dict[str, Any], message: str, processes_per_node: int) -> Any:
    """Rank of the process that wrote a line; None if it is one of several in the pod that cannot be distinguished."""
    if line.rank is not None:
        return line.rank
    if data.get("rank") is not None:
        return data["rank"]
    if processes_per_node == 1:
        return line.index
    prefix = _RANK_PREFIX.match(message)
    if prefix is None:
        return None
    return int(prefix[1])


def _json_object(text: str) -> dict[str, Any] | None:
    if not text.startswith("{"):
        return None
    try:
        return dict(json.loads(text, parse_constant=lambda _: None))  # NaN is not valid JSON
    except (ValueError, TypeError):
        return None


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
    run: ObservedRun, pods: dict[int, list[Object]], tail: int | None, previous: bool
) -> Iterator[LogLine]:
    """The lines written so far, merged by time. If a pod cannot be read (its node is lost), the error is raised after
    the lines of the others."""
    problems: list[LlmtrainError] = []
    streams = []
    for index, own in pods.items():
        shown = own if previous else own[-1:]
        streams.append(_last(_replica_lines(run, index, shown, tail, previous, problems), tail))
    yield from heapq.merge(*streams, key=lambda line: line.time)
    if problems:
        raise problems[0]


def _last(lines: Iterable[LogLine], count: int | None) -> Iterable[LogLine]:
    if count is None:
        return lines
    return deque(lines, maxlen=count)


def _replica_lines(
    run: ObservedRun,
    index: int,
    pods: list[Object],
    tail: int | None,
    previous: bool,
    problems: list[LlmtrainError],
) -> Iterator[LogLine]:
    for pod in pods:
        try:
            yield from _pod_lines(run, index, pod, tail, previous)
        except LlmtrainError as problem:
            problems.append(problem)


def _pod_lines(run: ObservedRun, index: int, pod: Object, tail: int | None, previous: bool) -> Iterator[LogLine]:
    name = pod["metadata"]["name"]
    container = run.record.kind.container
    shown = current_container(pod, container).get("name", container)
    _, _, restarts = container_state(pod, container)
    attempts = [False]
    if previous and restarts:  # the container before the last restart first
        attempts = [True, False]
    for is_previous in attempts:
        last_stamp = ""
        for line in run.cluster.log(name, run.namespace, shown, tail=tail, previous=is_previous, timestamps=True):
            stamp, text = split_time(line)
            last_stamp = stamp or last_stamp  # a line without a time stays behind the one before it
            yield LogLine(index, last_stamp, text, name)


def _follow(run: ObservedRun, index: int | None, tail: int | None) -> Iterator[LogLine]:
    """Lines as they are written, until the run ends. New pods are followed too."""
    logs = PodLogs(run, index, tail)
    record = run.record
    indexes = range(record.config.launch.node_range[0])
    if index is not None:
        indexes = range(index, index + 1)
    last_progress: dict[int, RunProgress] = {}
    reached_at = time.monotonic()
    ended_at = None
    try:
        while True:
            now = time.monotonic()
            try:
                run = ObservedRun(run.cluster, record, with_usage=False)
                has_ended = _has_ended(run)
                logs.update(run.pods)
                reached_at = now
                if has_ended:
                    ended_at = ended_at or now
            except ClusterError:
                if now - reached_at > UNREACHABLE_LIMIT_SEC:
                    raise
            if all(_is_idle(record, last_progress.get(each)) for each in indexes):
                return
            if ended_at and (logs.is_drained or now - ended_at > DRAIN_SEC):
                return
            next_look = now + (DRAIN_POLL_SEC if ended_at else POLL_SEC)
            while (remaining := next_look - time.monotonic()) > 0:
                for line in logs.lines(wait_sec=remaining):
                    last_progress[line.index] = RunProgress().after(line.text)
                    yield line
    finally:
        logs.close()


def _has_ended(run: ObservedRun) -> bool:
    """Whether the run has ended, judged by its job and pods only."""
    return find_state(run.record, Observation(run.job, run.pod_statuses)).has_ended


def _is_idle(record: Record, last: RunProgress | None) -> bool:
    """Whether a pod has ended and waits to be deleted: it will write no more lines."""
    return record.kind.pods_idle_at_end and last is not None and last.idle_code is not None


def _volume_lines(run: ObservedRun, rank: int | None, tail: int | None) -> Iterator[LogLine]:
    """Lines of the files under logs/ of the run directory, one file per process."""
    record = run.record
    if record.runs_claim is None:
        raise UsageError(
            f"The pods of run '{record.run_id}' are gone, and it kept no logs: launch.runs_volume is null.",
            remedy="Set launch.runs_volume to a volume to keep them.",
        )
    with reader_pod(run) as reader:
        files = {}
        for file in reader.files("logs/"):
            if rank in (None, _rank_of(file.path)):
                files[_rank_of(file.path)] = file.path
        if not files:
            which = "" if rank is None else f" of rank {rank}"
            raise UsageError(
                f"The pods of run '{record.run_id}' are gone, and its run directory has no log file{which}.",
                remedy="Set logging.log_to_file to keep logs on the volume. A run that never started has none.",
            )
        count = record.config.launch.processes_per_node
        with TemporaryFile() as spool:
            spans = _fetch_all(reader, sorted(files.values()), spool)
            streams = []
            for own, path in sorted(files.items()):
                if path in spans:
                    lines = _text_lines(_blocks(spool, *spans[path]))
                    streams.append(_last(_file_lines(own // count, own, lines), tail))
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
    if match is None:
        return 0
    return int(match[1])


def _file_lines(index: int, rank: int, lines: Iterable[str]) -> Iterator[LogLine]:
    last_time = ""
    for line in lines:
        last_time = _time_of(line) or last_time
        yield LogLine(index, last_time, line, rank=rank)


def _time_of(line: str) -> str | None:
    """When a line of a log file was written, as sortable text."""
    timestamp = _TIMESTAMP.match(line)
    if timestamp:
        return timestamp[0]
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
