"""Files from a Reader to this machine, each under its name once it is whole.

What has come so far lies beside it as `.<name>.<version>.part`, so that a broken connection, Ctrl-C or kill -9 costs
nothing: the next attempt goes on at that byte, if the far file is still the same."""

import glob
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from llmtrain.errors import ClusterError, UsageError
from llmtrain.operate.fetch.reader import Reader, RemoteFile, Sent, Wanted

Result = TypeVar("Result")

RETRIES = 5
PAUSE_SEC = 1.0  # after the first break; then twice as long each time


@dataclass
class Tally:
    """How far a fetch is."""

    show: Callable[["Tally"], None]
    files: int = 0
    skipped: int = 0
    received: int = 0
    """Bytes that came over the line."""
    had: int = 0
    """Bytes that were here already, of files that were half-done."""
    expected: int = 0
    """Bytes to bring in all, as far as is known."""

    def add(self, received: int = 0, had: int = 0) -> None:
        self.received += received
        self.had += had
        self.show(self)


def persist(reader: Reader, attempt: Callable[[], Result], reached: Callable[[], Any] = lambda: 0) -> Result:
    """Do something with a reader, again when the connection breaks, and as often as it gets further than before.
    `reached` says how far it is."""
    failures, furthest = 0, reached()
    while True:
        try:
            if failures:
                reader.renew()
            return attempt()
        except ClusterError:
            failures = 1 if reached() > furthest else failures + 1
            furthest = max(furthest, reached())
            if failures > RETRIES:
                raise
            time.sleep(PAUSE_SEC * 2 ** (failures - 1))


def receive(
    reader: Reader, root: Path, wanted: dict[str, Path], tally: Tally, lines: frozenset[str] = frozenset()
) -> dict[str, RemoteFile | None]:
    """Bring files (far path -> local path, below `root`); those that are gone are None. `lines`: files that are being
    written to, of which whole lines are kept."""
    done: dict[str, RemoteFile | None] = {}

    def waiting() -> list[str]:
        return [path for path in wanted if path not in done]

    def attempt() -> None:
        for sent, blocks in reader.read_many([_go_on(path, wanted[path]) for path in waiting()]):
            if sent.file is not None:
                _write(sent, sent.file, blocks, root, wanted[sent.path], sent.path in lines, tally)
            done[sent.path] = sent.file

    persist(reader, attempt, lambda: (len(done), sum(part_size(wanted[path]) for path in waiting())))
    return done


def part_size(path: Path) -> int:
    """Bytes of a file that came in an earlier attempt."""
    return sum(part.stat().st_size for part in _parts(path))


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What the disk refuses, in our words."""
    try:
        yield
    except OSError as problem:
        where = problem.filename or folder
        raise UsageError(
            f"Cannot write {where}: {problem.strerror or problem}.",
            remedy="What was fetched so far is kept: give it room, and fetch again.",
        ) from None


def _go_on(path: str, local: Path) -> Wanted:
    parts = _parts(local)
    if len(parts) != 1:
        return Wanted(path)
    version = parts[0].name.removeprefix(f".{local.name}.").removesuffix(".part")
    return Wanted(path, parts[0].stat().st_size, version)


def _parts(local: Path) -> list[Path]:
    return list(local.parent.glob(f".{glob.escape(local.name)}.*.part"))


def _write(
    sent: Sent, file: RemoteFile, blocks: Iterator[bytes], root: Path, local: Path, by_line: bool, tally: Tally
) -> None:
    with writing(local):
        make_parent(root, local)
        part = local.with_name(f".{local.name}.{file.version}.part")
        for other in _parts(local):
            if other != part or not sent.offset:
                other.unlink()
        tally.add(had=sent.offset)
        with part.open("r+b" if sent.offset else "w+b") as out:
            out.seek(sent.offset)
            out.truncate()
            _copy(blocks, out, tally)
            if by_line:
                _cut_after_last_line(out)
        os.utime(part, ns=(file.mtime_ns, file.mtime_ns))  # by which it is known the next time
        part.replace(local)
    tally.files += 1


def _copy(blocks: Iterator[bytes], out: BinaryIO, tally: Tally) -> None:
    for block in blocks:
        out.write(block)
        tally.add(received=len(block))


def _cut_after_last_line(out: BinaryIO) -> None:
    """Whoever writes the file may be in the middle of a line."""
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
    """A directory here may be a symbolic link that leads elsewhere: nothing is written through it."""
    local.parent.mkdir(parents=True, exist_ok=True)
    if not local.parent.resolve().is_relative_to(root.resolve()):
        raise UsageError(
            f"{local.parent} is a symbolic link that leads out of {root}: nothing is written there.",
            remedy="Remove it, or fetch to another directory with --to.",
        )
