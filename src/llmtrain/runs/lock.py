"""One writer a run. The owner keeps the lock file fresh; a lock whose owner is gone is taken over.

A second writer is refused while the owner is alive. The owner counts as gone when its process is (same machine)
or when its heartbeat is older than STALE_AFTER_SEC (another machine, or a stopped process). An owner that was
declared gone and comes back finds another token in the lock, and publishes nothing more: `check` tells.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from llmtrain.errors import PeerLost, Superseded, UsageError
from llmtrain.runs.atomic import read_json, write_json

HEARTBEAT_SEC = 2.0
STALE_AFTER_SEC = 30.0


class NullLock:
    """The lock as ranks other than 0 have it: rank 0 looks after it for them. They know its token."""

    def __init__(self, token: str = "") -> None:
        self.token = token

    def check(self) -> None:
        """Raise when somebody else has taken the run over; called before anything is published."""


class RunLock(NullLock):
    def __init__(self, path: Path, supersede: bool = False, wait_sec: float = 0.0) -> None:
        """`supersede`: take the run over even from a living owner, as a launcher does that starts a new generation
        (the old one may live on a machine that is cut off). `wait_sec`: how long the owner may still seem to live."""
        super().__init__(secrets.token_hex(8))
        self._path, self._supersede, self._wait_sec = path, supersede, wait_sec
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)

    def __enter__(self) -> "RunLock":
        # The guard makes look-and-take one act when two start at once.
        deadline = time.monotonic() + self._wait_sec
        while self._path.exists() and not self._supersede and is_held(self._path) and time.monotonic() < deadline:
            time.sleep(0.5)
        try:
            self._take()
        except (OSError, Timeout) as problem:
            if self._supersede:  # nobody is there to be told of a mistake: it is tried again
                raise PeerLost(f"The lock of run '{self._path.parent.name}' cannot be taken: {problem}.") from None
            raise UsageError(
                f"The lock of run '{self._path.parent.name}' cannot be taken: {problem}.",
                remedy="Check that you may write to the run directory.",
            ) from None
        self._thread.start()
        return self

    def _take(self) -> None:
        with FileLock(self._path.with_name(".lock.guard"), timeout=5):
            owner = read_json(self._path)
            if owner and not self._supersede and is_held(self._path):
                raise UsageError(
                    f"Run '{self._path.parent.name}' is being written by process {owner.get('pid')} on "
                    f"{owner.get('host')}.",
                    remedy="Wait for it or stop it; a lock whose owner died is taken over by itself.",
                )
            write_json(self._path, {"token": self.token, **_identity()})

    def check(self) -> None:
        owner = self._read()
        if not owner or owner.get("token") != self.token:
            raise Superseded(
                "Another process has taken this run over while this one was not answering.",
                remedy="Nothing more is written by this process; the other one goes on.",
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=HEARTBEAT_SEC * 2)
        with contextlib.suppress(OSError, Timeout), FileLock(self._path.with_name(".lock.guard"), timeout=5):
            owner = read_json(self._path)  # under the guard: it may be taken over at this very moment
            if owner and owner.get("token") == self.token:
                self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SEC):
            owner = read_json(self._path)
            if owner and owner.get("token") != self.token:
                return  # superseded: `check` says so at the next save
            with contextlib.suppress(OSError):  # a hiccup of the storage: the next beat tries again
                os.utime(self._path)

    def _read(self) -> Any:
        """The lock's content; asked again for a moment when it cannot be read, as network storage may hiccup."""
        for _ in range(5):
            owner = read_json(self._path)
            if owner:
                return owner
            time.sleep(0.1)
        return None


def _identity() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "process": _process_birth(os.getpid())}


def _alive(owner: dict[str, Any], heartbeat_age: float) -> bool:
    if heartbeat_age > STALE_AFTER_SEC:
        return False
    pid = owner.get("pid")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int):
        return True
    # Same machine: the process must still be the one that took the lock, not a later one with its number
    # (a restarted pod has the same host name and is process 1 again).
    return _process_birth(pid) == owner.get("process")


def _process_birth(pid: int) -> str | None:
    """What tells a process from a later one with the same number: this boot, and its start time in ticks."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return _process_exists(pid)
    state, *rest = stat.rpartition(")")[2].split()
    return None if state == "Z" else f"{boot}:{rest[18]}"


def _process_exists(pid: int) -> str | None:
    """Systems without /proc: only whether the number is in use."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "exists"


def is_held(path: Path) -> bool:
    """Whether a living process holds this lock."""
    owner = read_json(path)
    try:
        return bool(owner) and _alive(owner, time.time() - path.stat().st_mtime)
    except OSError:
        return False
