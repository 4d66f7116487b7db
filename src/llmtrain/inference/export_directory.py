"""The directory of an export: it has its files when all of them are written and checked, and nothing before."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmtrain.checkpoint.artifacts import TEMPORARY, temporary_path

_NAMED = "model"
"""The end of the name of a temporary directory inside of an existing target."""
_LOADED_FIRST = ("adapter_config.json", "config.json")
"""Without it the other files cannot be taken for a model."""
_unfinished: set[Path] = set()


def fill_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """A new directory gets its name when it is complete. An existing one is not replaced: it may be a mount point or
    a current directory."""
    is_new = not target.exists()
    with _temporary_directory(target if is_new else target / _NAMED) as new:
        fill(new)
        if is_new:
            new.rename(target)
            return
        for path in sorted(new.iterdir(), key=lambda path: (path.name in _LOADED_FIRST, path.name)):
            path.rename(target / path.name)


@contextmanager
def _temporary_directory(target: Path) -> Iterator[Path]:
    new = temporary_path(target, "new")
    _unfinished.add(new)
    descriptor: int | None = None
    try:
        new.mkdir()
        descriptor = os.open(new, os.O_RDONLY)
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield new
    finally:
        try:
            _remove(new)
        except BaseException:  # a second signal
            _remove(new)
            raise
        if descriptor is not None:
            os.close(descriptor)


def remove_unfinished() -> None:
    """Remove what the exports of this process have written, before it ends in a signal handler."""
    for path in list(_unfinished):
        _remove(path)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    _unfinished.discard(path)


def remove_leftovers(target: Path) -> None:
    """Remove what exports to the same place left behind that were killed. Those that are alive hold a lock."""
    for path in [*_leftovers(target.parent, target.name), *_leftovers(target, _NAMED)]:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError as problem:
            if problem.errno not in (errno.EWOULDBLOCK, errno.ENOLCK, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)


def _leftovers(directory: Path, name: str) -> list[Path]:
    prefix = f"{TEMPORARY}new-"
    with suppress(OSError):
        return [path for path in directory.iterdir() if path.name.startswith(prefix) and path.name.endswith(f"-{name}")]
    return []
