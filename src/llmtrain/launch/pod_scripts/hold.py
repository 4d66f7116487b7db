"""The script of `launch --hold` pods: they wait, receive files (`push`) and run commands (`exec`). The image need not
contain llmtrain, so it uses the standard library only, runs on Python 3.9 and later, and imports nothing from this
package.

    hold                            the pod's main process: waits, and runs commands for `start`
    take SIZE SHA256                unpack a tar archive from standard input into the work directory
    run VARIABLES COMMAND ...       run a command until it exits or the client disconnects; VARIABLES: a JSON object
    start VARIABLES LOG COMMAND ... let the main process run it, independent of the client; output also goes to LOG
    end                             stop the started command: SIGTERM, then SIGKILL
The last two print a JSON object: process, or problem.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

WORK = Path(os.environ.get("LLMTRAIN_WORK", "/work"))
STATE = WORK / ".llmtrain"
POLL_SEC = 0.2
ANSWER_SEC = 20.0
GRACE_SEC = 10.0  # between SIGTERM and SIGKILL
INTERRUPTED = 75
MIN_FREE_BYTES = 64 * 2**20
# Not passed on to commands: with them `llmtrain node` would act as the main process of the pod.
POD_VARIABLES = ("LLMTRAIN_EXIT_CODES", "LLMTRAIN_LAUNCH", "LLMTRAIN_HELD", "LLMTRAIN_PREFETCHED")


def receive_archive(size: int, digest: str) -> None:
    """Unpack a tar archive from standard input. Existing files are replaced atomically."""
    check_disk_space(size)
    with tempfile.TemporaryFile() as file:
        sha256 = hashlib.sha256()
        remaining = size
        while remaining:
            block = sys.stdin.buffer.read(min(remaining, 2**20))
            if not block:
                sys.exit("the archive is incomplete")
            sha256.update(block)
            file.write(block)
            remaining -= len(block)
        if sha256.hexdigest() != digest:
            sys.exit("the archive was damaged in transfer")
        file.seek(0)
        with tarfile.open(fileobj=file) as archive:
            for member in archive:
                unpack(archive, member)


def check_disk_space(size: int) -> None:
    """Exit if archive and files do not fit: a pod that fills the disk of its node is evicted."""
    needed: dict[int, tuple[Path, int]] = {}
    WORK.mkdir(parents=True, exist_ok=True)
    for directory in (Path(tempfile.gettempdir()), WORK):
        disk = directory.stat().st_dev
        needed[disk] = (directory, needed.get(disk, (directory, 0))[1] + size)
    for directory, total in needed.values():
        free = shutil.disk_usage(directory).free
        if free < total + MIN_FREE_BYTES:
            sys.exit(f"not enough disk space: {total:,} bytes needed in {directory}, {free:,} bytes free")


def unpack(archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    """Unpack a regular file below the work directory; anything else is an error."""
    path = Path(member.name)
    content = archive.extractfile(member) if member.isreg() else None
    if content is None or path.is_absolute() or ".." in path.parts:
        sys.exit(f"{member.name} is not a regular file inside the archive")
    target = WORK / path
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            shutil.copyfileobj(content, file)
        temporary.chmod(member.mode & 0o777)
        os.utime(temporary, (member.mtime, member.mtime))
        temporary.replace(target)
    finally:
        with suppress(OSError):
            temporary.unlink()


def run(variables: str, words: "list[str]") -> int:
    """Run a command and return its exit code. A broken connection (Ctrl-C) closes standard input and stops it."""
    try:
        child = spawn(json.loads(variables), words)
    except OSError as problem:
        print(f"cannot run {words[0]}: {problem.strerror}", file=sys.stderr)
        return 127  # like a shell

    is_disconnected = threading.Event()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        is_disconnected.set()
        terminate(child)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    code = shell_code(child.wait())
    if is_disconnected.is_set():  # wait until its descendants are gone too
        watcher.join()
    return code


def shell_code(code: int) -> int:
    """128 + N for a process killed by signal N, like a shell."""
    return code if code >= 0 else 128 - code


def spawn(variables: "dict[str, str]", words: "list[str]", output: Any = None) -> "subprocess.Popen[bytes]":
    """Start a command in its own session, so that all of its processes can be signaled at once."""
    return subprocess.Popen(
        words,
        cwd=WORK,
        env={**{name: value for name, value in os.environ.items() if name not in POD_VARIABLES}, **variables},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        start_new_session=True,
    )


def terminate(child: "subprocess.Popen[bytes]") -> None:
    """SIGTERM, then SIGKILL to it and its descendants (torchrun starts each worker in its own session)."""
    family = descendants(child.pid)
    send_signal(os.killpg, child.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SEC
    while time.monotonic() < deadline and (child.poll() is None or is_any_alive(child.pid, family)):
        time.sleep(0.05)
    for process in family | descendants(child.pid):
        send_signal(os.kill, process, signal.SIGKILL)
    send_signal(os.killpg, child.pid, signal.SIGKILL)


def processes() -> "dict[int, tuple[str, int, int]]":
    """All processes of the pod: pid -> (state, parent, process group)."""
    table = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError, IndexError):
                state, parent, group = (path / "stat").read_text().rpartition(")")[2].split()[:3]
                table[int(path.name)] = (state, int(parent), int(group))
    return table


def descendants(process: int) -> "set[int]":
    table = processes()
    family = {process}
    while more := {child for child, (_, parent, _) in table.items() if parent in family} - family:
        family |= more
    return family - {process}


def is_any_alive(group: int, family: "Iterable[int]" = ()) -> bool:
    """Whether a process of the group or the family exists that is not a zombie."""
    return any(state != "Z" and (own == group or process in family) for process, (state, _, own) in processes().items())


def send_signal(kill: "Callable[[int, int], None]", target: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        kill(target, number)


# The main process, and requests to it


def request_main(request: "dict[str, Any]") -> "dict[str, Any]":
    """Send a request to the main process and return its response."""
    number = f"{os.getpid()}-{time.time_ns()}"
    write(STATE / f"request-{number}.json", request)
    deadline = time.monotonic() + ANSWER_SEC + GRACE_SEC
    while time.monotonic() < deadline:
        answer = read(STATE / f"answer-{number}.json")
        if answer:
            (STATE / f"answer-{number}.json").unlink()
            return answer
        time.sleep(0.05)
    sys.exit("the main process of the pod does not respond")


def write(path: Path, value: "dict[str, Any]") -> None:
    STATE.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


def read(path: Path) -> "dict[str, Any]":
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


class Holder:
    """The main process of the pod. As process 1 it also reaps orphans."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.copier: threading.Thread | None = None
        self.stop = threading.Event()

    def hold(self) -> int:
        signal.signal(signal.SIGTERM, lambda *_: self.stop.set())
        for old in STATE.glob("*.json"):  # left by an earlier container of the pod
            old.unlink()
        problem = read(Path(os.environ.get("LLMTRAIN_PREFETCHED", ""))).get("what")
        if problem:  # the pod is still usable: files can be fetched by hand
            log(f"prefetch failed: {problem}")
        log(f"{os.uname().nodename} is ready: copy files to {WORK} with llmtrain push, run commands with llmtrain exec")
        while not self.stop.wait(POLL_SEC):
            self.reap()
            for path in sorted(STATE.glob("request-*.json")):
                request = read(path)
                path.unlink()
                write(STATE / path.name.replace("request", "answer"), self.answer(request))
        if self.child:
            terminate(self.child)
            self.reap()
        return INTERRUPTED + (128 if os.environ.get("LLMTRAIN_EXIT_CODES") == "pytorchjob" else 0)

    def answer(self, request: "dict[str, Any]") -> "dict[str, Any]":
        if "start" in request:
            if self.child:
                return {"problem": f"a command is already running (process {self.child.pid})"}
            try:
                self.child = spawn(request["variables"], request["start"], subprocess.PIPE)
            except OSError as problem:
                return {"problem": f"cannot run {request['start'][0]}: {problem.strerror}"}
            self.copier = threading.Thread(target=self.copy, args=(self.child, request["log"]), daemon=True)
            self.copier.start()
            log(f"started {' '.join(request['start'])} (process {self.child.pid})")
            return {"process": self.child.pid}
        child = self.child
        if child is None:
            return {"process": None}
        terminate(child)
        return {"process": child.pid}

    def copy(self, child: "subprocess.Popen[bytes]", path: str) -> None:
        """Copy its output to the pod's log and to a file on the volume."""
        file = None
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "ab", 0)  # noqa: PTH123, SIM115
        except OSError as problem:
            log(f"cannot write {path}: {problem.strerror}")
        for line in child.stdout or ():
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            try:
                if file:
                    file.write(line)
            except OSError as problem:
                log(f"cannot write {path}: {problem.strerror}")
                file = None

    def reap(self) -> None:
        """Reap the command and orphans that have exited."""
        child = self.child
        # Background processes of the command are part of it.
        if child and child.poll() is not None and not is_any_alive(child.pid):
            if self.copier:
                self.copier.join(5.0)
            log(f"process {child.pid} exited with code {shell_code(child.returncode)}")
            self.child = None
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if self.child and ended.si_pid == self.child.pid:
                    return  # reaped by poll() above
                os.waitpid(ended.si_pid, 0)


def log(text: str) -> None:
    print(f"[HOLD] {text}", flush=True)


def main(words: "list[str]") -> int:
    command, *rest = words
    if command == "hold":
        return Holder().hold()
    if command == "take":
        receive_archive(int(rest[0]), rest[1])
        return 0
    if command == "run":
        return run(rest[0], rest[1:])
    if command == "start":
        answer = request_main({"start": rest[2:], "variables": json.loads(rest[0]), "log": rest[1]})
    else:
        answer = request_main({"end": True})
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
