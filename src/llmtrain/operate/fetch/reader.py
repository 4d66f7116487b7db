"""Reading files of a run from the runs volume through a short-lived pod, while the run is active and after all of its
pods are gone. The pod runs launch/pod_scripts/file_server.py."""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from llmtrain.errors import ClusterError, DataError, LlmtrainError
from llmtrain.launch.pod_scripts.file_server import ANY
from llmtrain.operate.fetch.reader_pod import COMMAND, CONTAINER, is_running, start_reader
from llmtrain.operate.observed_run import ObservedRun

MAX_REQUEST_CHARACTERS = 4000  # the command is part of the request URL, for which proxies allow about 8 KB


@dataclass(frozen=True)
class RemoteFile:
    path: str
    """Relative to the run directory."""
    size: int
    mtime_ns: int
    version: str
    """Changes when the file changes or is replaced."""

    @property
    def mtime(self) -> float:
        return self.mtime_ns / 1e9


@dataclass(frozen=True)
class FileRequest:
    """A file to read, from `offset` if it still has this version, else from the beginning."""

    path: str
    offset: int = 0
    version: str = "-"


@dataclass(frozen=True)
class FileResponse:
    """The response to a FileRequest: the bytes from `offset` on. `file` is None if it does not exist."""

    path: str
    offset: int = 0
    file: RemoteFile | None = None


class Reader:
    """Reads files of one run. Paths are relative to its directory."""

    def __init__(self, run: ObservedRun) -> None:
        self.run = run
        self._directory = f"{run.record.config.output.mount_path}/{run.run_id}"
        self._pod = ""

    def files(self, prefix: str = "") -> list[RemoteFile]:
        """Regular files below the run directory (or a subdirectory), recursively; empty if it does not exist."""
        directory = f"{self._directory}/{prefix}".rstrip("/")
        lines = b"".join(self._run("list", directory)).splitlines()
        rows = [_remote_file(_parse(line), PurePosixPath(prefix)) for line in lines]
        return [row for row in rows if row is not None]

    def read(self, path: str, offset: int = 0) -> Iterator[bytes]:
        """A file from a byte on; empty if it does not exist or is shorter."""
        for _, blocks in self.read_many([FileRequest(path, offset, ANY)]):
            yield from blocks

    def read_many(self, requests: list[FileRequest]) -> Iterator[tuple[FileResponse, Iterator[bytes]]]:
        """Each file with its bytes, in order. Bytes not consumed before the next file are skipped."""
        for batch in _batches(requests):
            words: list[str] = []
            for each in batch:
                words += [str(each.offset), each.version, each.path]
            stream = _Stream(self._run("send", self._directory, *words))
            for request in batch:
                header = _parse(stream.line())
                if header["path"] != request.path:
                    raise DataError(f"The reader pod sent {header['path']!r} instead of {request.path!r}.")
                if header.get("gone"):
                    yield FileResponse(request.path), iter(())
                    continue
                size = int(header["size"])
                total = {**header, "size": int(header["offset"]) + size}
                blocks = stream.blocks(size)
                yield FileResponse(request.path, int(header["offset"]), _remote_file(total, PurePosixPath())), blocks
                for _ in blocks:
                    pass
            stream.finish()

    def renew(self) -> None:
        """Start another pod if this one is gone (its node is lost, or its deadline has passed)."""
        pod = self.run.cluster.get("v1", "Pod", self._pod, self.run.namespace)
        if pod is None or not is_running(pod):
            self.stop()
            self.start()

    def start(self) -> None:
        self._pod = f"{self.run.run_id}-reader-{secrets.token_hex(2)}"
        start_reader(self.run, self._pod)

    def stop(self) -> None:
        if self._pod:
            self.run.cluster.delete("v1", "Pod", self._pod, self.run.namespace)

    def _run(self, *words: str) -> Iterator[bytes]:
        return self.run.cluster.run(self._pod, self.run.namespace, CONTAINER, [*COMMAND, *words])


@contextmanager
def reader_pod(run: ObservedRun) -> Iterator[Reader]:
    """A Reader with a running pod, which is deleted on exit."""
    reader = Reader(run)
    try:
        reader.start()
        yield reader
    finally:
        with suppress(LlmtrainError):  # the pod has a deadline, and an earlier error matters more
            reader.stop()


def _batches(requests: list[FileRequest]) -> Iterator[list[FileRequest]]:
    """Split requests so that each batch fits into one command."""
    batch: list[FileRequest] = []
    available = MAX_REQUEST_CHARACTERS
    for request in requests:
        length = len(request.path.encode()) + len(request.version) + 40
        if batch and length > available:
            yield batch
            batch = []
            available = MAX_REQUEST_CHARACTERS
        batch.append(request)
        available -= length
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
        f"The reader pod sent {line[:100]!r} instead of a file list.",
        remedy="Its python3 may be a wrapper that prints. Pass another image that has python3 with --image.",
    )


def _remote_file(row: dict[str, Any], parent: PurePosixPath) -> RemoteFile | None:
    """None for a name that is not printable text."""
    check_path(row["path"])
    path = str(parent / row["path"])
    if not path.isprintable():
        return None
    return RemoteFile(path, int(row["size"]), int(row["mtime_ns"]), str(row["version"]))


def check_path(path: str) -> None:
    """Refuse names from the pod that would escape the local run directory."""
    parts = path.split("/")
    if path.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\\" in path:
        raise DataError(f"The reader pod sent a path outside the run directory: {path!r}. Nothing was written.")


class _Stream:
    """Reads lines and blocks from the chunks of a connection."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def line(self) -> bytes:
        while b"\n" not in self._rest:
            self._rest += self._next()
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def blocks(self, size: int) -> Iterator[bytes]:
        while size:
            chunk = self._rest or self._next()
            self._rest = chunk[size:]
            size -= len(chunk) - len(self._rest)
            yield chunk[: len(chunk) - len(self._rest)]

    def finish(self) -> None:
        """Read to the end: only there a failed command raises."""
        for _ in self._chunks:
            pass

    def _next(self) -> bytes:
        chunk = next(self._chunks, None)
        if chunk is None:
            raise ClusterError("The reader pod closed the connection early.", remedy="Try again.")
        return chunk
