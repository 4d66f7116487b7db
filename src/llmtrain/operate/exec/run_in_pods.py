"""Copying files into held pods (`push`) and running commands in all pods of a run at once (`exec`). The pods run
launch/pod_scripts/hold.py."""

import hashlib
import io
import json
import os
import tarfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from llmtrain.core.text import plural
from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.kubernetes.exec import STDERR, PodProcess
from llmtrain.launch.code_bundle import SKIPPED
from llmtrain.launch.pod_task import HELD_COMMAND, WORK_DIR
from llmtrain.launch.record import Record
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.pods import PodStatus

BLOCK = 2**16
MAX_PARALLEL_PUSHES = 16
MAX_PUSH_BYTES = 2**29  # all of it is held in memory, here and by the exec connections
OnLine = Callable[[int, int, str], None]
"""Called with every output line: node rank, STDOUT or STDERR, text."""


@dataclass(frozen=True)
class FileBundle:
    """Files as a tar archive."""

    data: bytes
    names: list[str]
    skipped: list[str]
    size: int
    """Total size of the files, without the archive headers."""


@dataclass(frozen=True)
class CommandResult:
    """Result of a command that `exec` ran in one pod."""

    index: int
    pod: str
    exit_code: int | None
    """None if the connection broke before the command exited."""
    problem: str = ""


def bundle_files(paths: Sequence[str]) -> FileBundle:
    """Files keep their names, directories their layout. Symbolic links inside directories are skipped."""
    names: dict[str, Path] = {}
    skipped: list[str] = []
    for argument in paths:
        if not argument.strip():
            raise UsageError("A path to push is empty.", remedy="Pass a file or directory; . is the current directory.")
        path = Path(argument).expanduser()
        if not path.exists():
            raise UsageError(f"{argument} does not exist.")
        top = Path(os.path.abspath(path))  # noqa: PTH100 (resolve() would replace the name of a symbolic link)
        for file in _files_below(top):
            name = str(file.relative_to(top.parent))
            if file != top and _is_skipped(file, top):
                skipped.append(name)
            elif name in names and names[name] != file:
                raise UsageError(f"{names[name]} and {file} would both be {name} in {WORK_DIR}.")
            else:
                names[name] = file
    if not names:
        raise UsageError(f"No files to push in {', '.join(paths)}.")
    _check_size(names)
    buffer = io.BytesIO()
    size = 0
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, file in names.items():
            size += _add(archive, name, file)
    return FileBundle(buffer.getvalue(), list(names), list(dict.fromkeys(skipped)), size)


def _files_below(top: Path) -> list[Path]:
    if top.is_file():
        return [top]
    # Also links to directories, so that they are reported as skipped.
    return sorted(path for path in top.rglob("*") if path.is_symlink() or not path.is_dir())


def _is_skipped(file: Path, top: Path) -> bool:
    """Whether a file inside a directory is left out: caches and secrets by name, and what is not a regular file."""
    for part in file.relative_to(top).parts:
        if any(fnmatchcase(part, pattern) for pattern in SKIPPED):
            return True
    return file.is_symlink() or not file.is_file()


def _check_size(names: dict[str, Path]) -> None:
    """Checked before reading, because the whole bundle is held in memory."""
    sizes: dict[str, int] = {}
    for name, file in names.items():
        with suppress(OSError):  # reported when the file is read
            sizes[name] = file.stat().st_size
    total = sum(sizes.values())
    if total > MAX_PUSH_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise UsageError(
            f"The files to push are {total:,} bytes; the limit is {MAX_PUSH_BYTES:,} bytes. The largest file is "
            f"{largest} ({sizes[largest]:,} bytes).",
            remedy="Push only code and configuration. Put data and models on volumes (launch.data_volume, "
            "launch.models_volume).",
        )


def _add(archive: tarfile.TarFile, name: str, file: Path) -> int:
    try:
        content = file.read_bytes()
        status = file.stat()
    except OSError as problem:
        raise UsageError(f"{file} cannot be read: {problem.strerror}.") from None
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    entry.mode = status.st_mode & 0o777
    entry.mtime = int(status.st_mtime)
    archive.addfile(entry, io.BytesIO(content))
    return len(content)


def running_pods(run: ObservedRun, selected: Sequence[str] = ()) -> list[PodStatus]:
    """All pods of the run, or those selected by index or name. An error if they are not running."""
    statuses = run.pod_statuses
    fewest, most = run.record.config.launch.node_range
    remedy = f"Diagnose it: llmtrain why {run.in_commands}. Start it again: llmtrain resume {run.in_commands}."
    pods = [pod for pod in statuses if pod.is_running]
    if not selected:
        if len(pods) < fewest:
            raise UsageError(f"Only {len(pods)} of {most} pods of run '{run.run_id}' are running.", remedy=remedy)
        return pods
    indexes = _indexes(statuses, most, selected)
    missing = sorted(indexes - {pod.index for pod in pods})
    if missing:
        names = ", ".join(map(str, missing))
        raise UsageError(f"Pod {names} of run '{run.run_id}' is not running.", remedy=remedy)
    return [pod for pod in pods if pod.index in indexes]


def _indexes(pods: Sequence[PodStatus], count: int, selected: Sequence[str]) -> set[int]:
    """Node ranks of pods that are given by rank or by name."""
    ranks = {str(index): index for index in range(count)}
    names = {pod.name: pod.index for pod in pods} | ranks
    unknown = [name for name in selected if name not in names]
    if unknown:
        raise UsageError(
            f"There is no pod {', '.join(unknown)}.",
            known=ranks,
            remedy="--pod takes a node rank, or a pod name as shown by llmtrain status.",
        )
    return {names[name] for name in selected}


def check_held(run: ObservedRun, command: str) -> None:
    """Refuse a run whose pods were not launched with --hold."""
    record = run.record
    if record.task.mode != "hold":
        raise UsageError(
            f"{command} needs a run launched with --hold; run '{record.run_id}' was launched in mode "
            f"{record.task.mode}.",
            remedy=f"Start one: llmtrain launch --hold --name NAME --image {record.config.launch.image}{run.place}.",
        )


def push(run: ObservedRun, bundle: FileBundle, selected: Sequence[str] = ()) -> list[PodStatus]:
    """Copy files to /work in all pods, or in the selected ones. Returns those pods."""
    check_held(run, "push")
    pods = running_pods(run, selected)
    words = ["take", str(len(bundle.data)), hashlib.sha256(bundle.data).hexdigest()]

    def send(pod: PodStatus) -> None:
        stderr = b""
        broken = None
        with closing(_start(run, pod, [*HELD_COMMAND, *words])) as process:
            try:
                for start in range(0, len(bundle.data), BLOCK):
                    process.write(bundle.data[start : start + BLOCK])
            except ClusterError as problem:  # the script exited early; its stderr has the reason
                broken = problem
            try:
                for channel, data in process.output():
                    if channel == STDERR:
                        stderr += data
            except ClusterError:
                if broken is None:
                    raise
        if broken and not stderr:
            raise broken
        process.check(stderr)

    _in_all(pods, send, MAX_PARALLEL_PUSHES)
    return pods


def run_in_all(
    run: ObservedRun, words: Sequence[str], on_line: OnLine, selected: Sequence[str] = ()
) -> list[CommandResult]:
    """Run a command in all pods (or the selected ones) concurrently until all exit. In held pods Ctrl-C stops it."""
    pods = running_pods(run, selected)
    processes: list[PodProcess] = []
    is_interrupted = threading.Event()

    def run_one(pod: PodStatus) -> CommandResult:
        command = list(words)
        if run.record.task.mode == "hold":
            command = [*HELD_COMMAND, "run", _variables(run.record, pod), *words]
        try:
            with closing(_start(run, pod, command)) as process:
                processes.append(process)
                if is_interrupted.is_set():
                    return CommandResult(pod.index, pod.name, None)
                _copy_lines(process, pod.index, on_line)
            return CommandResult(pod.index, pod.name, process.exit_code)
        except LlmtrainError as problem:
            return CommandResult(pod.index, pod.name, None, problem.what)

    with ThreadPoolExecutor(len(pods)) as threads:  # one thread per pod: the commands may wait for each other
        exits = [threads.submit(run_one, pod) for pod in pods]
        try:
            return [each.result() for each in exits]
        except BaseException:  # Ctrl-C, or a closed pipe (`| head`)
            is_interrupted.set()
            for process in processes:
                process.close()
            raise


def start_in_all(run: ObservedRun, words: Sequence[str], selected: Sequence[str] = ()) -> list[PodStatus]:
    """Start a command in the background in all pods (or the selected ones): in every one of them or in none."""
    check_held(run, "exec --detach")
    pods = running_pods(run, selected)
    started: list[PodStatus] = []

    def start(pod: PodStatus) -> None:
        rank = pod.index * run.record.config.launch.processes_per_node
        log = f"{run.record.config.output.mount_path}/{run.run_id}/logs/rank-{rank}.log"
        _request(run, pod, [*HELD_COMMAND, "start", _variables(run.record, pod), log, *words])
        started.append(pod)

    try:
        _in_all(pods, start, len(pods))
    except BaseException:
        _in_all(started, lambda pod: _kill(run, pod), len(pods))
        raise
    return pods


def kill_in_all(run: ObservedRun, selected: Sequence[str] = ()) -> list[PodStatus]:
    """Stop background commands in all pods, or in the selected ones. Returns the pods where one was running."""
    check_held(run, "exec --kill")
    pods = running_pods(run, selected)
    killed: list[PodStatus] = []

    def kill(pod: PodStatus) -> None:
        if _kill(run, pod):
            killed.append(pod)

    _in_all(pods, kill, len(pods))
    return sorted(killed, key=lambda pod: pod.index)


def _kill(run: ObservedRun, pod: PodStatus) -> bool:
    return _request(run, pod, [*HELD_COMMAND, "end"]).get("process") is not None


def _request(run: ObservedRun, pod: PodStatus, words: list[str]) -> dict[str, int | None]:
    """Send a request to hold.py in a pod and return its response."""
    output = run.cluster.run(pod.name, run.namespace, run.record.kind.container, words)
    answer = dict(json.loads(b"".join(output)))
    if "problem" in answer:
        remedy = f"Stop the running command: llmtrain exec {run.in_commands} --kill."
        raise UsageError(f"{answer['problem']}.", remedy=remedy)
    return answer


def _start(run: ObservedRun, pod: PodStatus, words: list[str]) -> PodProcess:
    is_held = run.record.task.mode == "hold"
    return run.cluster.start(pod.name, run.namespace, run.record.kind.container, words, stdin=is_held)


def _variables(record: Record, pod: PodStatus) -> str:
    """The PET_* variables, which make `torchrun train.py` in all pods one distributed job."""
    launch = record.config.launch
    variables = {
        "PET_NNODES": launch.node_range[1],
        "PET_NODE_RANK": pod.index,
        "PET_NPROC_PER_NODE": launch.processes_per_node,
        "PET_MASTER_ADDR": record.plan.master_addr,
        "PET_MASTER_PORT": record.plan.master_port,
    }
    return json.dumps({name: str(value) for name, value in variables.items()})


def _copy_lines(process: PodProcess, index: int, on_line: OnLine) -> None:
    rest: dict[int, bytes] = {}
    for channel, data in process.output():
        *whole, rest[channel] = (rest.get(channel, b"") + data).split(b"\n")
        for line in whole:
            on_line(index, channel, line.decode("utf-8", "replace"))
    for channel, line in rest.items():
        if line:
            on_line(index, channel, line.decode("utf-8", "replace"))


def _in_all(pods: Sequence[PodStatus], action: Callable[[PodStatus], object], max_parallel: int) -> None:
    """Run an action for all pods in parallel. If it fails in some, raise one error that counts them."""
    if not pods:
        return
    problems: list[tuple[int, str, LlmtrainError]] = []
    with ThreadPoolExecutor(min(len(pods), max_parallel)) as threads:
        futures = {threads.submit(action, pod): pod for pod in pods}
        try:
            for done in as_completed(futures):
                try:
                    done.result()
                except LlmtrainError as problem:
                    problems.append((futures[done].index, futures[done].name, problem))
        except BaseException:  # Ctrl-C
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    if problems:
        _, name, first = min(problems, key=lambda row: row[0])
        what = f"In {name}: {first.what.rstrip('.')}"
        if len(problems) > 1:
            what += f" (and in {plural(len(problems) - 1, 'other pod')})"
        error = ClusterError(f"{what}.", remedy=first.remedy)
        error.exit_code = first.exit_code
        raise error
