"""Reads files of a run on the runs volume, through a short-lived pod: while the run goes on, and after every pod of it
has gone. The far side is pod_scripts/file_server.py."""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from llmtrain.errors import ClusterError, DataError, LlmtrainError
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch.pod_scripts.file_server import ANY
from llmtrain.launch.record import Record
from llmtrain.operate.fetch.reader_pod import COMMAND, CONTAINER, is_running, start_reader

REQUEST_CHARACTERS = 4000  # a command travels in the address of a request, and proxies allow some 8 KB there


@dataclass(frozen=True)
class RemoteFile:
    path: str
    """Below the run directory."""
    size: int
    mtime_ns: int
    version: str
    """Differs once the file has changed, or another has taken its name."""

    @property
    def mtime(self) -> float:
        return self.mtime_ns / 1e9


@dataclass(frozen=True)
class Wanted:
    """A file to send, from a byte on if it still is that version."""

    path: str
    offset: int = 0
    version: str = "-"


@dataclass(frozen=True)
class Sent:
    """What is sent: from `offset` to the end the file has now. `file` is None where it is gone."""

    path: str
    offset: int = 0
    file: RemoteFile | None = None


class Reader:
    """Reads files of one run. Paths are relative to its directory."""

    def __init__(self, cluster: Cluster, record: Record) -> None:
        self._cluster, self._record = cluster, record
        self._folder = f"{record.config.output.mount_path}/{record.run_id}"
        self._pod = ""

    @property
    def run(self) -> str:
        """The run, as a command must name it."""
        return f"{self._record.run_id}{self._cluster.place(self._record.namespace)}"

    def files(self, prefix: str = "") -> list[RemoteFile]:
        """Plain files below the run directory (or a folder of it), however deep; none where there is no such folder."""
        folder = f"{self._folder}/{prefix}".rstrip("/")
        lines = b"".join(self._run("list", folder)).splitlines()
        rows = [_remote_file(_parse(line), PurePosixPath(prefix)) for line in lines]
        return [row for row in rows if row is not None]

    def read(self, path: str, offset: int = 0) -> Iterator[bytes]:
        """A file from a byte on; nothing where it is not there or not that long."""
        for _, blocks in self.read_many([Wanted(path, offset, ANY)]):
            yield from blocks

    def read_many(self, wanted: list[Wanted]) -> Iterator[tuple[Sent, Iterator[bytes]]]:
        """Each file with its bytes, in order. What is not read of a file before the next is asked for is passed
        over."""
        for batch in _batches(wanted):
            words = [word for want in batch for word in (str(want.offset), want.version, want.path)]
            stream = _Stream(self._run("send", self._folder, *words))
            for want in batch:
                header = _parse(stream.line())
                if header["path"] != want.path:
                    raise DataError(f"The reader pod sends {header['path']!r} where {want.path!r} was asked for.")
                if header.get("gone"):
                    yield Sent(want.path), iter(())
                    continue
                size = int(header["size"])
                total = {**header, "size": int(header["offset"]) + size}
                blocks = stream.take(size)
                yield Sent(want.path, int(header["offset"]), _remote_file(total, PurePosixPath())), blocks
                for _ in blocks:
                    pass
            stream.finish()

    def renew(self) -> None:
        """After a broken connection: another pod, where this one has gone (its machine is lost, its hour is over)."""
        found = self._cluster.get("v1", "Pod", self._pod, self._record.namespace)
        if found is None or not is_running(found):
            self.stop()
            self.start()

    def start(self) -> None:
        self._pod = f"{self._record.run_id}-reader-{secrets.token_hex(2)}"
        start_reader(self._cluster, self._record, self._pod)

    def stop(self) -> None:
        if self._pod:
            self._cluster.delete("v1", "Pod", self._pod, self._record.namespace)

    def _run(self, *words: str) -> Iterator[bytes]:
        return self._cluster.run(self._pod, self._record.namespace, CONTAINER, [*COMMAND, *words])


@contextmanager
def reader_pod(cluster: Cluster, record: Record) -> Iterator[Reader]:
    """A Reader whose pod runs; the pod is removed at the end, whatever that is."""
    reader = Reader(cluster, record)
    try:
        reader.start()
        yield reader
    finally:
        with suppress(LlmtrainError):  # it ends by itself, and what went wrong before is the error to tell
            reader.stop()


def _batches(wanted: list[Wanted]) -> Iterator[list[Wanted]]:
    batch: list[Wanted] = []
    room = REQUEST_CHARACTERS
    for want in wanted:
        length = len(want.path.encode()) + len(want.version) + 40
        if batch and length > room:
            yield batch
            batch, room = [], REQUEST_CHARACTERS
        batch.append(want)
        room -= length
    if batch:
        yield batch


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if isinstance(row["path"], str):
            return dict(row)
    except (ValueError, KeyError, TypeError):
        pass
    raise DataError(
        f"The reader pod says {line[:100]!r}, which is no list of files.",
        remedy="Its python3 may be a wrapper that prints. Name another image with --image; any with python3 will do.",
    )


def _remote_file(row: dict[str, Any], below: PurePosixPath) -> RemoteFile | None:
    """None for a name that cannot be written here (bytes that are no text)."""
    check_path(row["path"])
    path = str(below / row["path"])
    if not path.isprintable():
        return None
    return RemoteFile(path, int(row["size"]), int(row["mtime_ns"]), str(row["version"]))


def check_path(path: str) -> None:
    """Names come from the far side: none may lead out of the directory it is written to."""
    parts = path.split("/")
    if path.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\\" in path:
        raise DataError(f"The reader pod names a file outside the run directory: {path!r}. Nothing was written.")


class _Stream:
    """Lines and blocks out of the pieces a connection brings."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def line(self) -> bytes:
        while b"\n" not in self._rest:
            self._rest += self._next()
        found, _, self._rest = self._rest.partition(b"\n")
        return found

    def take(self, size: int) -> Iterator[bytes]:
        while size:
            piece = self._rest or self._next()
            self._rest = piece[size:]
            size -= len(piece) - len(self._rest)
            yield piece[: len(piece) - len(self._rest)]

    def finish(self) -> None:
        """To the end: only there it shows whether the command failed."""
        for _ in self._pieces:
            pass

    def _next(self) -> bytes:
        piece = next(self._pieces, None)
        if piece is None:
            raise ClusterError("The reader pod ended too early.", remedy="Try again.")
        return piece
