"""What runs in the pods of `launch --hold`: they wait, take files (`push`) and run commands (`exec`). The image need
not have llmtrain: the standard library alone, Python 3.9 and later, and no import from this package.

    hold                            the pod's first process: waits, and runs what `start` asks for
    take SIZE SHA256                a tar archive from standard input, into the work folder
    run VARIABLES COMMAND ...       a command, until it ends or the caller goes away; VARIABLES: a JSON object
    start VARIABLES LOG COMMAND ... the same by the first process, which outlives the caller; output also goes to LOG
    end                             what was started is told to end, and killed if it does not
The last two answer with a JSON object: process, or problem.
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
GRACE_SEC = 10.0  # between telling and killing
TOLD = 75
ROOM = 64 * 2**20  # bytes to leave free on a disk
# Of the pod, not of what is tried out in it: `llmtrain node` would take itself for the pod's own.
OWN = ("LLMTRAIN_EXIT_CODES", "LLMTRAIN_LAUNCH", "LLMTRAIN_HELD", "LLMTRAIN_PREFETCHED")


def take(size: int, digest: str) -> None:
    """Files that were there before are replaced whole or not at all. The archive and its files are there at once."""
    check_room(size)
    with tempfile.TemporaryFile() as file:
        check, left = hashlib.sha256(), size
        while left:
            block = sys.stdin.buffer.read(min(left, 2**20))
            if not block:
                sys.exit("the archive ends too early")
            check.update(block)
            file.write(block)
            left -= len(block)
        if check.hexdigest() != digest:
            sys.exit("the archive was damaged on its way")
        file.seek(0)
        with tarfile.open(fileobj=file) as archive:
            for member in archive:
                unpack(archive, member)


def check_room(size: int) -> None:
    """Before anything is sent: a pod that fills the disk of its machine is evicted."""
    needed: dict[int, tuple[Path, int]] = {}
    WORK.mkdir(parents=True, exist_ok=True)
    for folder in (Path(tempfile.gettempdir()), WORK):
        disk = folder.stat().st_dev
        needed[disk] = (folder, needed.get(disk, (folder, 0))[1] + size)
    for folder, total in needed.values():
        free = shutil.disk_usage(folder).free
        if free < total + ROOM:
            sys.exit(f"no room: {total:,} bytes are needed in {folder}, {free:,} bytes are free")


def unpack(archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    """Plain files below the work folder, nothing else."""
    path = Path(member.name)
    content = archive.extractfile(member) if member.isreg() else None
    if content is None or path.is_absolute() or ".." in path.parts:
        sys.exit(f"{member.name} is no plain file")
    target = WORK / path
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with fresh.open("wb") as file:
            shutil.copyfileobj(content, file)
        fresh.chmod(member.mode & 0o777)
        os.utime(fresh, (member.mtime, member.mtime))
        fresh.replace(target)
    finally:
        with suppress(OSError):
            fresh.unlink()


def run(variables: str, words: "list[str]") -> int:
    """Its exit code. When the connection breaks (Ctrl-C), standard input ends, and the command with it."""
    try:
        child = begin(json.loads(variables), words)
    except OSError as problem:
        print(f"{words[0]} cannot be run: {problem.strerror}", file=sys.stderr)
        return 127  # as a shell has it

    is_left = threading.Event()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        is_left.set()
        finish(child)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    code = as_code(child.wait())
    if is_left.is_set():  # else what it started would outlive us
        watcher.join()
    return code


def as_code(code: int) -> int:
    """In a shell's words: 128 and more for a signal."""
    return code if code >= 0 else 128 - code


def begin(variables: "dict[str, str]", words: "list[str]", output: Any = None) -> "subprocess.Popen[bytes]":
    """In a session of its own, so that all of its processes can be told at once."""
    return subprocess.Popen(
        words,
        cwd=WORK,
        env={**{name: value for name, value in os.environ.items() if name not in OWN}, **variables},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        start_new_session=True,
    )


def finish(child: "subprocess.Popen[bytes]") -> None:
    """Tell it, wait, then kill it and what it started (torchrun gives each of its processes a session of its own)."""
    family = descendants(child.pid)
    tell(os.killpg, child.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SEC
    while time.monotonic() < deadline and (child.poll() is None or is_any_left(child.pid, family)):
        time.sleep(0.05)
    for process in family | descendants(child.pid):
        tell(os.kill, process, signal.SIGKILL)
    tell(os.killpg, child.pid, signal.SIGKILL)


def processes() -> "dict[int, tuple[str, int, int]]":
    """Of this pod: number -> its state, its parent and its group."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError, IndexError):
                state, parent, group = (path / "stat").read_text().rpartition(")")[2].split()[:3]
                found[int(path.name)] = (state, int(parent), int(group))
    return found


def descendants(process: int) -> "set[int]":
    known, found = processes(), {process}
    while more := {child for child, (_, parent, _) in known.items() if parent in found} - found:
        found |= more
    return found - {process}


def is_any_left(group: int, family: "Iterable[int]" = ()) -> bool:
    """Of a group of processes, or of these, but for zombies."""
    return any(state != "Z" and (own == group or process in family) for process, (state, _, own) in processes().items())


def tell(how: "Callable[[int, int], None]", who: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        how(who, number)


# The first process, and those who ask something of it


def ask(request: "dict[str, Any]") -> "dict[str, Any]":
    """Of the first process: its answer has the same number."""
    number = f"{os.getpid()}-{time.time_ns()}"
    write(STATE / f"request-{number}.json", request)
    deadline = time.monotonic() + ANSWER_SEC + GRACE_SEC
    while time.monotonic() < deadline:
        answer = read(STATE / f"answer-{number}.json")
        if answer:
            (STATE / f"answer-{number}.json").unlink()
            return answer
        time.sleep(0.05)
    sys.exit("the pod's first process does not answer")


def write(path: Path, value: "dict[str, Any]") -> None:
    STATE.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(value))
    fresh.replace(path)


def read(path: Path) -> "dict[str, Any]":
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


class Holder:
    """The first process. Orphans are handed to it by the kernel: it sees them off too."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.copier: threading.Thread | None = None
        self.is_told = threading.Event()

    def hold(self) -> int:
        signal.signal(signal.SIGTERM, lambda *_: self.is_told.set())
        for old in STATE.glob("*.json"):  # of a container that was here before
            old.unlink()
        problem = read(Path(os.environ.get("LLMTRAIN_PREFETCHED", ""))).get("what")
        if problem:  # the pods are of use all the same: it can be fetched by hand
            say(f"what the config names was not fetched: {problem}")
        say(f"{os.uname().nodename} waits: llmtrain push brings files to {WORK}, llmtrain exec runs commands there")
        while not self.is_told.wait(POLL_SEC):
            self.look()
            for path in sorted(STATE.glob("request-*.json")):
                request = read(path)
                path.unlink()
                write(STATE / path.name.replace("request", "answer"), self.answer(request))
        if self.child:
            finish(self.child)
            self.look()
        return TOLD + (128 if os.environ.get("LLMTRAIN_EXIT_CODES") == "pytorchjob" else 0)

    def answer(self, request: "dict[str, Any]") -> "dict[str, Any]":
        if "start" in request:
            if self.child:
                return {"problem": f"a command is still running here (process {self.child.pid})"}
            try:
                self.child = begin(request["variables"], request["start"], subprocess.PIPE)
            except OSError as problem:
                return {"problem": f"{request['start'][0]} cannot be run: {problem.strerror}"}
            self.copier = threading.Thread(target=self.copy, args=(self.child, request["log"]), daemon=True)
            self.copier.start()
            say(f"started {' '.join(request['start'])} (process {self.child.pid})")
            return {"process": self.child.pid}
        child = self.child
        if child is None:
            return {"process": None}
        finish(child)
        return {"process": child.pid}

    def copy(self, child: "subprocess.Popen[bytes]", log: str) -> None:
        """What it says: to the pod's log and to a file on the volume, as it comes."""
        file = None
        try:
            Path(log).parent.mkdir(parents=True, exist_ok=True)
            file = open(log, "ab", 0)  # noqa: PTH123, SIM115
        except OSError as problem:
            say(f"{log} cannot be written: {problem.strerror}")
        for line in child.stdout or ():
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            try:
                if file:
                    file.write(line)
            except OSError as problem:
                say(f"{log} cannot be written: {problem.strerror}")
                file = None

    def look(self) -> None:
        """See off whoever has ended."""
        child = self.child
        # What it left in the background is its too.
        if child and child.poll() is not None and not is_any_left(child.pid):
            if self.copier:
                self.copier.join(5.0)
            say(f"process {child.pid} ended with exit code {as_code(child.returncode)}")
            self.child = None
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if self.child and ended.si_pid == self.child.pid:
                    return  # in a moment
                os.waitpid(ended.si_pid, 0)


def say(text: str) -> None:
    print(f"[HOLD] {text}", flush=True)


def main(words: "list[str]") -> int:
    what, rest = words[0], words[1:]
    if what == "hold":
        return Holder().hold()
    if what == "take":
        take(int(rest[0]), rest[1])
        return 0
    if what == "run":
        return run(rest[0], rest[1:])
    if what == "start":
        answer = ask({"start": rest[2:], "variables": json.loads(rest[0]), "log": rest[1]})
    else:
        answer = ask({"end": True})
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
