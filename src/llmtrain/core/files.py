"""Reading and atomic writing of files: after a crash a file has its old or its new content, never a part of it."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from llmtrain.errors import TrainingFailed

RESERVE_BYTES = 1 << 20
"""Disk space that checkpoints leave free for metrics, logs and other small files of the run."""


def is_full(problem: BaseException | None) -> bool:
    """Whether a write failed because disk space, inodes or the quota are used up."""
    return isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_full(directory: Path, why: str) -> TrainingFailed:
    return TrainingFailed(
        f"The disk of {directory} is full: {why}.",
        remedy="Free some space, or set output.root_dir to a directory on another disk.",
        reason="disk_full",
    )


def fsync_dir(path: Path) -> None:
    """Make renames inside a directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_there(path: Path) -> bool:
    """Like Path.exists, but False in a directory that may not be read, where Path.exists raises."""
    try:
        path.lstat()
    except OSError:
        return False
    return True


def use_default_mode(path: Path) -> None:
    """Give a file the mode that the umask gives, which its directory has; libraries that write a temporary file first
    leave it readable only for its owner. (The umask itself cannot be read without changing it for all threads.)"""
    with contextlib.suppress(OSError):  # some network storage has fixed modes
        path.chmod(path.parent.stat().st_mode & 0o666)


def write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, text: str) -> None:
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: Path, data: bytes) -> None:
    # Not the process id: pods that share a volume may have the same.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        write_synced(temporary, data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def write_json_in_place(path: Path, value: Any) -> None:
    """For a full disk: overwrite the file, whose blocks are allocated. Restores the old content if it does not fit."""
    data = (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
    with path.open("r+b", buffering=0) as file:
        before = file.read()
        try:
            if file.seek(0) or file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            file.truncate()
            os.fsync(file.fileno())
        except OSError:
            file.seek(0)
            file.write(before)
            file.truncate()
            raise


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_text(path: Path, errors: str = "strict") -> TextIO:
    """Open a regular file for reading; raises OSError for a named pipe, on which `open` would block."""
    return os.fdopen(_open_regular(path), encoding="utf-8", errors=errors)


def open_bytes(path: Path) -> BinaryIO:
    """As open_text, for a file that is no text."""
    return os.fdopen(_open_regular(path), "rb")


def _open_regular(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_json(path: Path) -> Any:
    """The parsed value, or None if the file is missing, unreadable or invalid."""
    try:
        with open_text(path) as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
