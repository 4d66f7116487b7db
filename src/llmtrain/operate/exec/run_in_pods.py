"""Hands on the pods of a run, all at once: bring files to those that are held (`push`), run commands in them (`exec`).
The far side is launch/held_pod.py."""

import hashlib
import io
import json
import os
import tarfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.kubernetes.client import Cluster
from llmtrain.kubernetes.exec import STDERR, PodProcess
from llmtrain.launch.record import Record
from llmtrain.launch.work import HELD_COMMAND, WORK_DIR
from llmtrain.operate.status.pods import PodStatus, pod_statuses
from llmtrain.operate.status.run_status import find_pods

BLOCK = 2**16
PUSHES_AT_ONCE = 16
PUSH_BYTES = 2**29
# Of a folder that is pushed: what is made anew, is huge, or is nobody's business.
LEFT_OUT = (
    *("__pycache__", ".git", ".venv", ".env", ".env.*", ".DS_Store"),
    *(".netrc", "_netrc", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*.pem"),
)
Say = Callable[[int, int, str], None]
"""Told every line: of which node, STDOUT or STDERR, the line."""


@dataclass(frozen=True)
class FileBundle:
    """Files as a tar archive."""

    data: bytes
    names: list[str]
    left_out: list[str]
    size: int
    """Of the files themselves."""


@dataclass(frozen=True)
class NodeEnd:
    index: int
    pod: str
    exit_code: int | None
    """None where the connection broke before it ended."""
    problem: str = ""


def pack(paths: Sequence[str]) -> FileBundle:
    """Files keep their names, folders what is in them. Symbolic links inside folders are left out: they may lead
    anywhere."""
    names: dict[str, Path] = {}
    left_out: list[str] = []
    for given in paths:
        if not given.strip():
            raise UsageError("A path to push is empty.", remedy="Name a file or a folder; . is the current folder.")
        path = Path(given).expanduser()
        if not path.exists():
            raise UsageError(f"{given} does not exist.")
        top = Path(os.path.abspath(path))  # noqa: PTH100 (a link keeps its name)
        found = (
            [top]
            if top.is_file()
            else sorted(each for each in top.rglob("*") if each.is_symlink() or not each.is_dir())
        )
        for file in found:
            name = str(file.relative_to(top.parent))
            inner = file.relative_to(top).parts if file != top else ()
            if any(fnmatchcase(part, each) for part in inner for each in LEFT_OUT) or (
                file != top and (file.is_symlink() or not file.is_file())
            ):
                left_out.append(name)
            elif name in names and names[name] != file:
                raise UsageError(f"{names[name]} and {file} would both be {name} in {WORK_DIR}.")
            else:
                names[name] = file
    if not names:
        raise UsageError(f"There is no file in {', '.join(paths)}.")
    _check_size(names)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        size = sum(_add(archive, name, file) for name, file in names.items())
    return FileBundle(buffer.getvalue(), list(names), list(dict.fromkeys(left_out)), size)


def _check_size(names: dict[str, Path]) -> None:
    """Before anything is read: all of it is held in memory, here and on its way to every pod."""
    sizes: dict[str, int] = {}
    for name, file in names.items():
        with suppress(OSError):  # said when it is read
            sizes[name] = file.stat().st_size
    total = sum(sizes.values())
    if total > PUSH_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise UsageError(
            f"{total:,} bytes are too many to push, at most {PUSH_BYTES:,} are. The largest file is {largest} with "
            f"{sizes[largest]:,} bytes.",
            remedy="push is for programs and their settings. Put data on a volume (launch.data_volume), models too "
            "(launch.models_volume), or name fewer files.",
        )


def _add(archive: tarfile.TarFile, name: str, file: Path) -> int:
    try:
        content = file.read_bytes()
        found = file.stat()
    except OSError as problem:
        raise UsageError(f"{file} cannot be read: {problem.strerror}.") from None
    row = tarfile.TarInfo(name)
    row.size, row.mode, row.mtime = len(content), found.st_mode & 0o777, int(found.st_mtime)
    archive.addfile(row, io.BytesIO(content))
    return len(content)


def find_nodes(cluster: Cluster, record: Record, chosen: Sequence[str] = ()) -> list[PodStatus]:
    """The pods of all nodes, or those that are chosen by index or name; they must run."""
    found = pod_statuses(record, find_pods(cluster, record))
    fewest, most = record.config.launch.node_range
    run = f"{record.run_id}{cluster.place(record.namespace)}"
    remedy = f"llmtrain why {run} says what the others wait for; llmtrain resume {run} starts them again."
    if chosen:
        indexes = _indexes(found, most, chosen)
        pods = [pod for pod in found if pod.index in indexes and pod.is_running]
        if missing := sorted(indexes - {pod.index for pod in pods}):
            names = ", ".join(map(str, missing))
            raise UsageError(f"Pod {names} of run '{record.run_id}' is not running.", remedy=remedy)
        return pods
    pods = [pod for pod in found if pod.is_running]
    if len(pods) < fewest:
        raise UsageError(f"{len(pods)} of {most} pods of run '{record.run_id}' run.", remedy=remedy)
    return pods


def _indexes(found: Sequence[PodStatus], count: int, chosen: Sequence[str]) -> set[int]:
    by_name = {pod.name: pod.index for pod in found}
    by_name |= {str(index): index for index in range(count)}
    if unknown := [name for name in chosen if name not in by_name]:
        raise UsageError(
            f"There is no pod {', '.join(unknown)}.",
            known=[str(index) for index in range(count)],
            remedy="--pod takes the index of a pod, which is its node rank, or its name as llmtrain status shows it.",
        )
    return {by_name[name] for name in chosen}


def check_held(cluster: Cluster, record: Record, what: str) -> None:
    if record.work.mode != "hold":
        raise UsageError(
            f"{what} needs pods that are held, and run '{record.run_id}' has another use for its pods.",
            remedy=f"Start some with: llmtrain launch --hold --name NAME --image {record.config.launch.image}"
            f"{cluster.place(record.namespace)}.",
        )


def push(cluster: Cluster, record: Record, parcel: FileBundle, chosen: Sequence[str] = ()) -> list[PodStatus]:
    """The same files into the work folder of every pod, or of those that are chosen."""
    check_held(cluster, record, "push")
    pods = find_nodes(cluster, record, chosen)
    words = ["take", str(len(parcel.data)), hashlib.sha256(parcel.data).hexdigest()]

    def send(pod: PodStatus) -> None:
        complaint, broken = b"", None
        with closing(_start(cluster, record, pod, [*HELD_COMMAND, *words])) as process:
            try:
                for at in range(0, len(parcel.data), BLOCK):
                    process.write(parcel.data[at : at + BLOCK])
            except ClusterError as problem:  # it has ended before it took everything: it says why
                broken = problem
            with suppress(ClusterError) if broken else nullcontext():
                for channel, data in process.output():
                    complaint += data if channel == STDERR else b""
        if broken and not complaint:
            raise broken
        process.check(complaint)

    _in_all(pods, send, PUSHES_AT_ONCE)
    return pods


def run_in_all(
    cluster: Cluster, record: Record, words: Sequence[str], say: Say, chosen: Sequence[str] = ()
) -> list[NodeEnd]:
    """A command in every pod (or those chosen) at the same time, until all have ended. Ctrl-C ends them where pods are
    held."""
    pods = find_nodes(cluster, record, chosen)
    processes: list[PodProcess] = []
    is_leaving = threading.Event()

    def one(pod: PodStatus) -> NodeEnd:
        prefix = [*HELD_COMMAND, "run", _variables(record, pod)] if record.work.mode == "hold" else []
        try:
            with closing(_start(cluster, record, pod, [*prefix, *words])) as process:
                processes.append(process)
                if is_leaving.is_set():
                    return NodeEnd(pod.index, pod.name, None)
                _copy_lines(process, pod.index, say)
            return NodeEnd(pod.index, pod.name, process.exit_code)
        except LlmtrainError as problem:
            return NodeEnd(pod.index, pod.name, None, problem.what)

    with ThreadPoolExecutor(len(pods)) as threads:  # they may wait for each other: all at once
        ends = [threads.submit(one, pod) for pod in pods]
        try:
            return [end.result() for end in ends]
        except BaseException:  # Ctrl-C, and a reader of ours that has seen enough (`| head`)
            is_leaving.set()
            for process in processes:
                process.close()
            raise


def start_in_all(cluster: Cluster, record: Record, words: Sequence[str], chosen: Sequence[str] = ()) -> list[PodStatus]:
    """A command in every pod (or those chosen) that goes on when we have gone; in all of them or in none."""
    check_held(cluster, record, "exec --detach")
    pods = find_nodes(cluster, record, chosen)
    started: list[PodStatus] = []

    def start(pod: PodStatus) -> None:
        rank = pod.index * record.config.launch.processes_per_node
        log = f"{record.config.output.mount_path}/{record.run_id}/logs/rank-{rank}.log"
        far = [*HELD_COMMAND, "start", _variables(record, pod), log, *words]
        _answer(cluster, record, pod, far)
        started.append(pod)

    try:
        _in_all(pods, start, len(pods))
    except BaseException:
        _in_all(started, lambda pod: _end(cluster, record, pod), len(pods))
        raise
    return pods


def end_in_all(cluster: Cluster, record: Record, chosen: Sequence[str] = ()) -> list[PodStatus]:
    """What was started is ended, everywhere or in the pods chosen; the pods where something was."""
    check_held(cluster, record, "exec --kill")
    pods = find_nodes(cluster, record, chosen)
    ended: list[PodStatus] = []

    def end(pod: PodStatus) -> None:
        if _end(cluster, record, pod):
            ended.append(pod)

    _in_all(pods, end, len(pods))
    return sorted(ended, key=lambda pod: pod.index)


def _end(cluster: Cluster, record: Record, pod: PodStatus) -> bool:
    return _answer(cluster, record, pod, [*HELD_COMMAND, "end"]).get("process") is not None


def _answer(cluster: Cluster, record: Record, pod: PodStatus, words: list[str]) -> dict[str, int | None]:
    answer = dict(json.loads(b"".join(cluster.run(pod.name, record.namespace, record.workload.container, words))))
    if "problem" in answer:
        run = f"{record.run_id}{cluster.place(record.namespace)}"
        raise UsageError(f"{answer['problem']}.", remedy=f"llmtrain exec {run} --kill ends what was started before.")
    return answer


def _start(cluster: Cluster, record: Record, pod: PodStatus, words: list[str]) -> PodProcess:
    is_held = record.work.mode == "hold"
    return cluster.start(pod.name, record.namespace, record.workload.container, words, stdin=is_held)


def _variables(record: Record, pod: PodStatus) -> str:
    """What torchrun and `llmtrain node` read: with it `torchrun train.py` in every pod is one job, whether all pods are
    told at once or one after the other."""
    launch = record.config.launch
    place = {
        "PET_NNODES": launch.node_range[1],
        "PET_NODE_RANK": pod.index,
        "PET_NPROC_PER_NODE": launch.processes_per_node,
        "PET_MASTER_ADDR": record.plan.master_addr,
        "PET_MASTER_PORT": record.plan.master_port,
    }
    return json.dumps({name: str(value) for name, value in place.items()})


def _copy_lines(process: PodProcess, index: int, say: Say) -> None:
    rest: dict[int, bytes] = {}
    for channel, data in process.output():
        *whole, rest[channel] = (rest.get(channel, b"") + data).split(b"\n")
        for line in whole:
            say(index, channel, line.decode("utf-8", "replace"))
    for channel, line in rest.items():
        if line:
            say(index, channel, line.decode("utf-8", "replace"))


def _in_all(pods: Sequence[PodStatus], act: Callable[[PodStatus], object], at_once: int) -> None:
    """Where it fails in some pods, one error names them."""
    if not pods:
        return
    problems: list[tuple[int, str, LlmtrainError]] = []
    with ThreadPoolExecutor(min(len(pods), at_once)) as threads:
        waiting = {threads.submit(act, pod): pod for pod in pods}
        try:
            for done in as_completed(waiting):
                try:
                    done.result()
                except LlmtrainError as problem:
                    problems.append((waiting[done].index, waiting[done].name, problem))
        except BaseException:  # Ctrl-C: those that have not begun do not
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    if problems:
        _, name, first = min(problems, key=lambda row: row[0])
        others = f" (and in {len(problems) - 1} other pods)" if len(problems) > 1 else ""
        error = ClusterError(f"In {name}: {first.what.rstrip('.')}{others}.", remedy=first.remedy)
        error.exit_code = first.exit_code
        raise error
