"""One writer per run. The owner refreshes the lock file; a lock whose owner has ended is taken over.

A second writer is refused while the owner is alive. On one machine, inside one PID namespace, the process table shows
whether it is. Elsewhere (another machine, container, boot or time namespace) only the heartbeat does: the owner is
alive if the mtime of the lock changes, and gone after STALE_AFTER_SEC without a change, by the monotonic clock of the
process that waits. A start never compares the clocks of two machines; only `is_held`, which decides nothing
about writing, does.

An owner that was declared gone but continues finds another token in the lock: `check` raises, so it publishes nothing.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from llmtrain.compat.run_files import lacks_namespaces
from llmtrain.core.files import is_full, open_text, write_json
from llmtrain.core.logs import log, warn
from llmtrain.errors import PeerLost, Superseded, UsageError

HEARTBEAT_SEC = 2.0
STALE_AFTER_SEC = 30.0
_POLL_SEC = 0.25
_MAX_COUNTED_SEC = 1.0


class Lock(ABC):
    def __init__(self, token: str) -> None:
        self.token = token

    @abstractmethod
    def check(self) -> None:
        """Raise if another process has taken over the run; called before anything is published."""


class NullLock(Lock):
    """For ranks other than 0, which know the token of the lock that rank 0 holds."""

    def check(self) -> None:
        pass


class _LockState(NamedTuple):
    """The content and mtime of a lock file at one moment."""

    owner: dict[str, Any]
    heartbeat: int

    @property
    def token(self) -> Any:
        return self.owner.get("token")


class _HeartbeatWatch:
    """Compares the lock at each poll with the one before."""

    def __init__(self) -> None:
        self._before: _LockState | None = None
        self._polled_at = 0.0
        self._unchanged_sec = 0.0

    @property
    def has_started(self) -> bool:
        return self._before is not None

    def is_alive(self, state: _LockState) -> bool | None:
        """True if the lock has changed since the last poll, False after STALE_AFTER_SEC without a change, else None."""
        now = time.monotonic()
        has_changed = self.has_started and state != self._before
        if has_changed:
            self._unchanged_sec = 0.0
        elif self.has_started:
            # In a longer gap this process itself was suspended, perhaps together with the owner.
            self._unchanged_sec += min(now - self._polled_at, _MAX_COUNTED_SEC)
        self._before = state
        self._polled_at = now
        if has_changed:
            return True
        if self._unchanged_sec >= STALE_AFTER_SEC:
            return False
        return None


class RunLock(Lock):
    def __init__(self, path: Path, supersede: bool = False, wait_sec: float = 0.0) -> None:
        """`supersede`: take over the run even from a live owner, as a launcher that starts a new generation must: the
        old one may run on an unreachable node. `wait_sec`: how long to wait for a live owner to end."""
        super().__init__(secrets.token_hex(8))
        self._path = path.absolute()
        self._supersede = supersede
        self._wait_sec = wait_sec
        self._unreadable_since: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)

    @property
    def path(self) -> Path:
        return self._path

    def follow(self, path: Path) -> None:
        """The run directory was renamed by the owner of this lock: release it there."""
        self._path = path

    def __enter__(self) -> "RunLock":
        deadline = time.monotonic() + self._wait_sec
        try:
            is_taken = False
            while not is_taken:
                abandoned = None
                if not self._supersede:
                    abandoned = self._wait_for_owner(deadline)
                # False if another process has taken the lock meanwhile: wait for that one.
                is_taken = self._take(abandoned)
        except (OSError, Timeout) as problem:
            if is_full(problem):
                raise
            if self._supersede:  # unattended: a restart may help
                raise PeerLost(f"Cannot lock run '{self._path.parent.name}': {problem}.") from None
            raise UsageError(
                f"Cannot lock run '{self._path.parent.name}': {problem}.",
                remedy="Check the permissions of the run directory.",
            ) from None
        self._thread.start()
        return self

    def _wait_for_owner(self, deadline: float) -> _LockState | None:
        """The stale lock of an owner that has ended, or None if there is no lock. Raises if the owner is alive, and
        still is at the deadline."""
        heartbeat = _HeartbeatWatch()
        while True:
            state = self._read_retrying()
            if state is None:
                return None
            is_alive = _is_alive(state.owner)
            if is_alive is None:  # the process table cannot show it; the heartbeat does
                if not heartbeat.has_started:
                    log(
                        "TRAIN",
                        f"run '{self._path.parent.name}' is locked by {_name(state.owner)}; waiting up to "
                        f"{STALE_AFTER_SEC:.0f} s for its heartbeat",
                    )
                is_alive = heartbeat.is_alive(state)
            if is_alive is False:
                return state
            if is_alive and time.monotonic() >= deadline:
                raise UsageError(
                    f"Run '{self._path.parent.name}' is being written by {_name(state.owner)}.",
                    remedy="Wait until it ends, or stop it. A lock whose owner has ended is taken over automatically.",
                )
            time.sleep(_POLL_SEC)

    def _read_retrying(self) -> _LockState | None:
        """The lock; None if there is none, or one without an owner. An unreadable lock may still be held: reading is
        retried for STALE_AFTER_SEC."""
        while True:
            try:
                state = _read(self._path)
            except OSError as problem:
                since = self._unreadable_since
                if since is None:
                    self._unreadable_since = since = time.monotonic()
                    why = problem.strerror or problem
                    warn("TRAIN", f"cannot read {self._path}: {why}; retrying for up to {STALE_AFTER_SEC:.0f} s")
                if time.monotonic() - since >= STALE_AFTER_SEC:
                    raise
                time.sleep(_POLL_SEC)
            else:
                self._unreadable_since = None
                return state

    def _take(self, abandoned: _LockState | None) -> bool:
        """Write this process into the lock, unless it is no longer `abandoned` (None: there was no lock). A lock that
        is superseded is not compared."""
        with FileLock(self._path.with_name(".lock.guard"), timeout=5):  # makes comparing and writing atomic
            if not self._supersede and self._read_retrying() != abandoned:
                return False
            write_json(self._path, {"token": self.token, **_identity()})
            return True

    def check(self) -> None:
        try:
            state = self._read_retrying()
            for _ in range(4):
                if state:
                    break
                time.sleep(0.1)  # network storage may show a file late
                state = self._read_retrying()
        except OSError as problem:
            raise PeerLost(
                f"The lock of this run could not be read for {STALE_AFTER_SEC:.0f} s ({problem}); another process may "
                "have taken over the run meanwhile.",
                remedy="Check the storage, then start the run again: it resumes from the newest checkpoint.",
            ) from None
        if state is None:
            what = f"The lock of this run, {self._path}, was removed or overwritten."
        elif state.token != self.token:
            what = f"Another process has taken over this run, because this one was unresponsive: {_name(state.owner)}."
        else:
            return
        raise Superseded(what, remedy="This process writes nothing more.")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=HEARTBEAT_SEC * 2)
        with contextlib.suppress(OSError, Timeout), FileLock(self._path.with_name(".lock.guard"), timeout=5):
            state = _read(self._path)  # under the guard: another process may be taking it over
            if state and state.token == self.token:
                self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SEC):
            with contextlib.suppress(OSError):  # retried at the next heartbeat
                state = _read(self._path)
                if state and state.token != self.token:
                    return  # superseded: `check` raises at the next save
                os.utime(self._path)


def is_held(path: Path) -> bool:
    """Whether a process holds this lock, without waiting. Where RunLock would wait for a heartbeat, its age by this
    machine's clock decides."""
    try:
        state = _read(path)
    except OSError:
        return False
    if state is None:
        return False
    is_alive = _is_alive(state.owner)
    if is_alive is None:
        return abs(time.time() - state.heartbeat / 1e9) <= STALE_AFTER_SEC
    return is_alive


def owner_pid(path: Path) -> int | None:
    """The process of this machine that holds the lock; None if there is none."""
    try:
        state = _read(path)
    except OSError:
        return None
    if state is None or not _is_alive(state.owner):
        return None
    return int(state.owner["pid"])


def _read(path: Path) -> _LockState | None:
    """The lock; None if it is missing or damaged. Opening the file, unlike stat, makes NFS refresh its mtime."""
    try:
        with open_text(path) as file:
            heartbeat = os.fstat(file.fileno()).st_mtime_ns
            owner = json.load(file)
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    if not isinstance(owner, dict) or not owner:
        return None
    return _LockState(owner, heartbeat)


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
    """Whether the owner's process is alive; None if the process table of this machine or container cannot show it."""
    pid = owner.get("pid")
    birth = owner.get("process")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
        return None
    here = _process_birth(pid)
    if birth == _EXISTS:  # written without /proc (macOS): the pid may have been reused
        return False if here is None else None
    if not isinstance(birth, str) or birth.partition(":")[0] != _boot_id() or here == _EXISTS:
        return None
    if lacks_namespaces(owner):
        return True if here == birth else None
    if owner["pid_namespace"] is None or owner["pid_namespace"] != _namespace("pid"):
        return None
    if owner["time_namespace"] != _namespace("time"):  # where start times of processes are shifted
        return None
    # The process must be the one that took the lock, not a later one with its pid (the first process of a restarted
    # container has pid 1 again).
    return here == birth


_EXISTS = "exists"


def _process_birth(pid: int) -> str | None:
    """Boot id and start time in ticks, which distinguish a process from a later one with the same pid. None if there is
    no such process."""
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
    """The inode of a namespace of this process: containers with the same host name have different processes. None if
    the kernel has no such namespace (/proc/self/ns/time came with Linux 5.6)."""
    try:
        return Path(f"/proc/self/ns/{kind}").stat().st_ino
    except OSError:
        return None


def _process_exists(pid: int) -> str | None:
    """For systems whose /proc is missing or hides processes of other users: only whether the pid is in use."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    except OverflowError:
        return None
    return _EXISTS
