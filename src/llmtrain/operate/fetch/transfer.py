"""Downloading files with a Reader. A file gets its name once it is complete.

Until then it is stored as `.<name>.<version>.part`, so that after a broken connection, Ctrl-C or kill -9 the next
attempt continues at that byte if the remote file has not changed."""

import glob
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from llmtrain.errors import ClusterError, UsageError
from llmtrain.operate.fetch.reader import FileRequest, FileResponse, Reader, RemoteFile

Result = TypeVar("Result")

MAX_RETRIES = 5
RETRY_SEC = 1.0  # doubled with each retry


@dataclass
class FetchProgress:
    """Counters of a fetch."""

    show: Callable[["FetchProgress"], None]
    files: int = 0
    skipped: int = 0
    received: int = 0
    """Bytes downloaded."""
    had: int = 0
    """Bytes of partial files from an earlier attempt."""
    expected: int = 0
    """Total bytes to download, as far as known."""

    def add(self, received: int = 0, had: int = 0) -> None:
        self.received += received
        self.had += had
        self.show(self)


def retry(reader: Reader, attempt: Callable[[], Result], position: Callable[[], Any] = lambda: 0) -> Result:
    """Call `attempt`, again after a broken connection. Retries are limited only while `position` does not advance."""
    failures = 0
    furthest = position()
    while True:
        try:
            if failures:
                reader.renew()
            return attempt()
        except ClusterError:
            failures = 1 if position() > furthest else failures + 1
            furthest = max(furthest, position())
            if failures > MAX_RETRIES:
                raise
            time.sleep(RETRY_SEC * 2 ** (failures - 1))


def receive(
    reader: Reader, root: Path, paths: dict[str, Path], progress: FetchProgress, appended: frozenset[str] = frozenset()
) -> dict[str, RemoteFile | None]:
    """Download files (remote path -> local path below `root`); None for those that no longer exist. Of `appended` files
    only complete lines are kept."""
    done: dict[str, RemoteFile | None] = {}

    def remaining() -> list[str]:
        return [path for path in paths if path not in done]

    def attempt() -> None:
        for response, blocks in reader.read_many([_request(path, paths[path]) for path in remaining()]):
            path = response.path
            if response.file is not None:
                _write(response, response.file, blocks, root, paths[path], path in appended, progress)
            done[path] = response.file

    def position() -> tuple[int, int]:
        return len(done), sum(part_size(paths[path]) for path in remaining())

    retry(reader, attempt, position)
    return done


def part_size(path: Path) -> int:
    """Bytes of a partial file from an earlier attempt."""
    return sum(part.stat().st_size for part in _parts(path))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn OSError into a UsageError."""
    try:
        yield
    except OSError as problem:
        where = problem.filename or path
        raise UsageError(
            f"Cannot write {where}: {problem.strerror or problem}.",
            remedy="Fix the cause and fetch again; what was fetched so far is kept.",
        ) from None


def _request(path: str, local: Path) -> FileRequest:
    """A request that continues a partial file."""
    parts = _parts(local)
    if len(parts) != 1:
        return FileRequest(path)
    version = parts[0].name.removeprefix(f".{local.name}.").removesuffix(".part")
    return FileRequest(path, parts[0].stat().st_size, version)


def _parts(local: Path) -> list[Path]:
    return list(local.parent.glob(f".{glob.escape(local.name)}.*.part"))


def _write(
    response: FileResponse,
    file: RemoteFile,
    blocks: Iterator[bytes],
    root: Path,
    local: Path,
    is_appended: bool,
    progress: FetchProgress,
) -> None:
    with writing(local):
        make_parent(root, local)
        part = local.with_name(f".{local.name}.{file.version}.part")
        for other in _parts(local):
            if other != part or not response.offset:
                other.unlink()
        progress.add(had=response.offset)
        with part.open("r+b" if response.offset else "w+b") as out:
            out.seek(response.offset)
            out.truncate()
            _copy(blocks, out, progress)
            if is_appended:
                _truncate_to_last_line(out)
        os.utime(part, ns=(file.mtime_ns, file.mtime_ns))  # the next fetch recognizes the file by it
        part.replace(local)
    progress.files += 1


def _copy(blocks: Iterator[bytes], out: BinaryIO, progress: FetchProgress) -> None:
    for block in blocks:
        out.write(block)
        progress.add(received=len(block))


def _truncate_to_last_line(out: BinaryIO) -> None:
    """Drop an incomplete last line: the file may be written to while it is read."""
    end = out.seek(0, os.SEEK_END)
    while end:
        start = out.seek(max(0, end - 2**16))
        newline = out.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    out.truncate(end)


def make_parent(root: Path, local: Path) -> None:
    """Create the parent directory. Refused if a symbolic link leads out of `root`."""
    local.parent.mkdir(parents=True, exist_ok=True)
    if not local.parent.resolve().is_relative_to(root.resolve()):
        raise UsageError(
            f"{local.parent} is a symbolic link that leads out of {root}.",
            remedy="Remove it, or fetch to another directory with --to. Nothing was written there.",
        )
