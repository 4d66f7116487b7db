"""Check of what runs require of the file system of output.root_dir (docs/storage.md).

A mount of an object store accepts writes, but cannot rename a directory or append to a file.
"""

import mmap
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from llmtrain.core.files import fsync_dir, write_synced
from llmtrain.core.findings import Finding, failed, passed
from llmtrain.core.text import one_line

OLD = b"before"
NEW = b"after!"


class _WrongResult(Exception):
    """An operation that raised no error and had another effect."""


def file_system(directory: Path) -> Finding:
    """Tries every operation in a temporary directory."""
    probe = directory / f".llmtrain-{secrets.token_hex(4)}"
    problems = []
    try:
        probe.mkdir()
        for name, operation in OPERATIONS.items():
            try:
                operation(probe)
            except (OSError, NotImplementedError, _WrongResult) as problem:
                problems.append(f"{name} ({_reason(problem)})")
    except OSError as problem:
        problems.append(f"creating a directory ({_reason(problem)})")
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    if problems:
        return failed(
            "file system",
            f"{directory} does not support {'; '.join(problems)}",
            "Set output.root_dir to a local disk or a shared file system such as NFS v4 or CephFS, not to a mount of "
            "an object store; output.sync_uri copies finished runs to one.",
        )
    return passed("file system", f"{directory} supports {', '.join(OPERATIONS)}")


def _reason(problem: Exception) -> str:
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    return one_line(problem, 100)


def _expect(path: Path, content: bytes) -> None:
    """Through a new descriptor, as another process reads it."""
    found = path.read_bytes()
    if found != content:
        raise _WrongResult(f"{len(content)} bytes were expected, {len(found)} others were read")


def _replace_file(directory: Path) -> None:
    """Metadata and the token of the lock are written this way."""
    path = directory / "file"
    new = directory / "file.new"
    path.write_bytes(OLD)
    new.write_bytes(NEW)
    new.replace(path)
    _expect(path, NEW)
    if new.exists():
        raise _WrongResult("the old name still exists")


def _rename_directory(directory: Path) -> None:
    """A checkpoint is published this way."""
    temporary = directory / "step_1.tmp"
    temporary.mkdir()
    (temporary / "file").write_bytes(NEW)
    temporary.rename(directory / "step_1")
    _expect(directory / "step_1" / "file", NEW)
    if temporary.exists():
        raise _WrongResult("the old name still exists")


def _append(directory: Path) -> None:
    """metrics.jsonl grows by one line per step, also after a restart."""
    path = directory / "appended"
    path.write_bytes(OLD)
    with path.open("ab") as file:
        file.write(NEW)
        file.flush()
        _expect(path, OLD + NEW)


def _overwrite(directory: Path) -> None:
    """On a full disk, state is written over the blocks that it has."""
    path = directory / "overwritten"
    path.write_bytes(OLD + OLD)
    with path.open("r+b") as file:
        file.write(NEW)
    _expect(path, NEW + OLD)


def _sync(directory: Path) -> None:
    write_synced(directory / "synced", NEW)
    fsync_dir(directory)


def _lock(directory: Path) -> None:
    """Only one process may write to a run."""
    path = directory / "lock"
    with FileLock(path):
        try:
            with FileLock(path, timeout=0, is_singleton=False):
                raise _WrongResult("a second process would get it too")
        except Timeout:
            return


def _create_once(directory: Path) -> None:
    path = directory / "created"
    path.touch(exist_ok=False)
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return
    raise _WrongResult("an existing file was created again")


def _map(directory: Path) -> None:
    """Tokens are read through a memory map."""
    path = directory / "mapped"
    path.write_bytes(NEW)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        if mapped[:] != NEW:
            raise _WrongResult("other bytes were read")


OPERATIONS: dict[str, Callable[[Path], None]] = {
    "rename over a file": _replace_file,
    "rename of a directory": _rename_directory,
    "append": _append,
    "overwrite": _overwrite,
    "fsync": _sync,
    "locks": _lock,
    "exclusive create": _create_once,
    "memory maps": _map,
}
