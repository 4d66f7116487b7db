"""One writer per run. The owner refreshes the lock file; a lock whose owner is gone is taken over.

A second writer is refused while the owner is alive. On one machine, inside one PID namespace, the process table says
at once whether it is. Elsewhere (another machine, another container, another boot, another time namespace) only the
heartbeat can tell: a change of the lock's time is a sign of life, and STALE_AFTER_SEC without a change, by the
monotonic clock of the process that waits, means that the owner is gone. Clocks of two machines are never compared.

An owner that was declared gone and comes back finds another token in the lock, and publishes nothing more: `check`
raises.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from filelock import FileLock, Timeout

from llmtrain.errors import PeerLost, Superseded, UsageError
from llmtrain.files import is_full, open_text, write_json
from llmtrain.logs import log, warn

HEARTBEAT_SEC = 2.0
STALE_AFTER_SEC = 30.0
_LOOK_EVERY_SEC = 0.25
_MOST_COUNTED_SEC = 1.0


class Lock(Protocol):
    """The claim of a process to write to a run."""

    token: str

    def check(self) -> None:
        """Raise Superseded if another process has taken over the run. Called before anything is published."""


class NullLock:
    """The lock on ranks other than 0: it knows the token and leaves the check to rank 0."""

    def __init__(self, token: str = "") -> None:
        self.token = token

    def check(self) -> None:
        pass


class _Seen(NamedTuple):
    """A lock file at one moment."""

    owner: dict[str, Any]
    heartbeat: int

    @property
    def token(self) -> Any:
        return self.owner.get("token")


class RunLock:
    def __init__(self, path: Path, supersede: bool = False, wait_sec: float = 0.0) -> None:
        """`supersede`: take the run over even from a living owner, as a launcher does that starts a new generation
        (the old one may live on a machine that is cut off). `wait_sec`: how long the owner may still seem to live."""
        self.token = secrets.token_hex(8)
        self._path, self._supersede, self._wait_sec = path, supersede, wait_sec
        self._unreadable_since: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)

    def __enter__(self) -> "RunLock":
        deadline = time.monotonic() + self._wait_sec
        try:
            while not self._take(None if self._supersede else self._wait_for_owner(deadline)):
                pass  # another process was faster: look at that one
        except (OSError, Timeout) as problem:
            if is_full(problem):
                raise
            if self._supersede:  # nobody is there to be told of a mistake: it is tried again
                raise PeerLost(f"The lock of run '{self._path.parent.name}' cannot be taken: {problem}.") from None
            raise UsageError(
                f"The lock of run '{self._path.parent.name}' cannot be taken: {problem}.",
                remedy="Check that you may write to the run directory.",
            ) from None
        self._thread.start()
        return self

    def _wait_for_owner(self, deadline: float) -> _Seen | None:
        """The lock of an owner that is gone, or None where there is no lock; raises while the owner is alive."""
        before: _Seen | None = None
        unchanged_sec, last_look = 0.0, time.monotonic()
        while True:
            seen = self._look()
            if seen is None:
                return None
            is_alive = _is_alive(seen.owner)
            if is_alive is False:
                return seen
            now = time.monotonic()
            if is_alive is None:
                if before is None:
                    log(
                        "TRAIN",
                        f"run '{self._path.parent.name}' has a lock of {_name(seen.owner)}; waiting up to "
                        f"{STALE_AFTER_SEC:.0f} s for its heartbeat",
                    )
                elif before != seen:
                    is_alive, unchanged_sec = True, 0.0
                else:
                    # A long gap is one in which this process itself was frozen, perhaps together with the owner.
                    unchanged_sec += min(now - last_look, _MOST_COUNTED_SEC)
                if unchanged_sec >= STALE_AFTER_SEC:
                    return seen
                before, last_look = seen, now
            if is_alive and now >= deadline:
                raise UsageError(
                    f"Run '{self._path.parent.name}' is being written by {_name(seen.owner)}.",
                    remedy="Wait for it or stop it; a lock whose owner has ended is taken over automatically.",
                )
            time.sleep(_LOOK_EVERY_SEC)

    def _look(self) -> _Seen | None:
        """The lock; None where there is none, or one without an owner. A lock that cannot be read is neither free nor
        lost: it is read again for STALE_AFTER_SEC."""
        while True:
            try:
                seen = _read(self._path)
            except OSError as problem:
                since = self._unreadable_since
                if since is None:
                    self._unreadable_since = since = time.monotonic()
                    why = problem.strerror or problem
                    warn("TRAIN", f"{self._path} cannot be read: {why}; retrying for up to {STALE_AFTER_SEC:.0f} s")
                if time.monotonic() - since >= STALE_AFTER_SEC:
                    raise
                time.sleep(_LOOK_EVERY_SEC)
            else:
                self._unreadable_since = None
                return seen

    def _take(self, gone: _Seen | None) -> bool:
        """Write this process into the lock, unless it has changed since it was judged."""
        with FileLock(self._path.with_name(".lock.guard"), timeout=5):  # so that looking and taking are one act
            if not self._supersede and self._look() != gone:
                return False
            write_json(self._path, {"token": self.token, **_identity()})
            return True

    def check(self) -> None:
        try:
            seen = self._look()
            for _ in range(4):
                if seen:
                    break
                time.sleep(0.1)  # network storage may show a file late
                seen = self._look()
        except OSError as problem:
            raise PeerLost(
                f"The lock of this run could not be read for {STALE_AFTER_SEC:.0f} s ({problem}); another process may "
                "have taken the run over in this time.",
                remedy="Check the storage, then start the run again: it resumes from the newest checkpoint.",
            ) from None
        if seen is None:
            what = f"The lock of this run, {self._path}, was removed or overwritten."
        elif seen.token != self.token:
            what = f"Another process has taken this run over while this one was not answering: {_name(seen.owner)}."
        else:
            return
        raise Superseded(what, remedy="Nothing more is written by this process.")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=HEARTBEAT_SEC * 2)
        with contextlib.suppress(OSError, Timeout), FileLock(self._path.with_name(".lock.guard"), timeout=5):
            seen = _read(self._path)  # under the guard: it may be taken over at this very moment
            if seen and seen.token == self.token:
                self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SEC):
            with contextlib.suppress(OSError):  # a hiccup of the storage: the next beat tries again
                seen = _read(self._path)
                if seen and seen.token != self.token:
                    return  # superseded: `check` says so at the next save
                os.utime(self._path)


def is_held(path: Path) -> bool:
    """Whether a process holds this lock, as far as one look can tell. Where only the heartbeat can say it, and so
    RunLock would wait for a change, its age by this machine's clock has to do."""
    try:
        seen = _read(path)
    except OSError:
        return False
    if seen is None:
        return False
    is_alive = _is_alive(seen.owner)
    return abs(time.time() - seen.heartbeat / 1e9) <= STALE_AFTER_SEC if is_alive is None else is_alive


def _read(path: Path) -> _Seen | None:
    """The lock; None where there is none, or a damaged one. Opening the file, unlike looking at its directory entry,
    makes NFS ask the server for its time."""
    try:
        with open_text(path) as file:
            heartbeat = os.fstat(file.fileno()).st_mtime_ns
            owner = json.load(file)
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return _Seen(owner, heartbeat) if isinstance(owner, dict) and owner else None


def _name(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid')} on {owner.get('host')}"


def _identity() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "process": _process_birth(os.getpid()),
        "pid_namespace": _namespace("pid"),
        "time_namespace": _namespace("time"),
    }


def _is_alive(owner: dict[str, Any]) -> bool | None:
    """Whether the owner's process is alive; None where the process table that is seen here cannot tell."""
    pid, birth = owner.get("pid"), owner.get("process")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
        return None
    here = _process_birth(pid)
    if birth == _EXISTS:  # written where there is no /proc (macOS): a number says nothing of its later bearers
        return False if here is None else None
    if not isinstance(birth, str) or birth.partition(":")[0] != _boot_id() or here == _EXISTS:
        return None
    if "pid_namespace" not in owner or "time_namespace" not in owner:  # a lock of an earlier version
        return True if here == birth else None
    if owner["pid_namespace"] is None or owner["pid_namespace"] != _namespace("pid"):
        return None
    if owner["time_namespace"] != _namespace("time"):  # there, the start times of processes are shifted
        return None
    # The process must still be the one that took the lock, not a later one with its number (a restarted container's
    # first process is number 1 again).
    return here == birth


_EXISTS = "exists"


def _process_birth(pid: int) -> str | None:
    """What tells a process from a later one with the same number: this boot, and its start time in ticks. None where
    there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return _process_exists(pid)
    state, *rest = stat.rpartition(")")[2].split()
    boot = _boot_id()
    if state == "Z":
        return None
    return f"{boot}:{rest[18]}" if boot else _EXISTS


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _namespace(kind: str) -> int | None:
    """The inode of this process's namespace: containers of one machine may share its name, not its processes. None
    where there is none (/proc/self/ns/time came with Linux 5.6)."""
    try:
        return Path(f"/proc/self/ns/{kind}").stat().st_ino
    except OSError:
        return None


def _process_exists(pid: int) -> str | None:
    """Systems without /proc, or with one that hides other users' processes: only whether the number is in use."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    except OverflowError:
        return None
    return _EXISTS
