"""A local copy of the small files of a run on a cluster, kept up to date while the run is on screen. They are read
from the runs volume through a reader pod, as `fetch` does, also after all pods of the run are gone."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

from llmtrain.errors import ClusterError, LlmtrainError
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch.pod_scripts.file_server import ANY
from llmtrain.launch.record import Record
from llmtrain.operate.fetch.reader import FileRequest, Reader, RemoteFile
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.page.run_values import Values
from llmtrain.page.values import message
from llmtrain.runs.checksums import CHECKSUMS, POINTERS
from llmtrain.runs.directory import RunDirectory

ROUND_SEC = 3.0
IDLE_SEC = 45.0
"""The reader pod is deleted when the run has not been on screen for this long."""
RETRY_SEC = 30.0
"""After a reader pod could not be started."""
CLOSE_SEC = 5.0
MAX_BYTES = 1 << 20
"""Maximum bytes of a file other than the metrics."""
_NAMES = RunDirectory(Path())
_FILES = {path.name for path in (_NAMES.config, _NAMES.meta, _NAMES.metrics, _NAMES.generations, _NAMES.finished)}
_DIRECTORIES = {path.name for path in (_NAMES.exits, _NAMES.heartbeats, _NAMES.samples, _NAMES.task_scores)}


class Mirror:
    def __init__(self, cluster: Cluster, record: Record, parent: Path) -> None:
        self.run = RunDirectory(parent / record.run_id)
        self.problem: Values | None = None
        self._cluster = cluster
        self._record = record
        self._known: dict[str, RemoteFile] = {}
        self._wanted_at = 0.0
        self._is_closed = threading.Event()
        self._has_read = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.run.path.mkdir(parents=True, exist_ok=True)

    def want(self, wait_sec: float = 0.0) -> RunDirectory:
        """Keep the copy up to date for a while. `wait_sec`: for the first reading."""
        self._wanted_at = time.monotonic()
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._read, daemon=True, name=f"mirror of {self.run.run_id}")
                self._thread.start()
        self._has_read.wait(wait_sec)
        return self.run

    def close(self) -> None:
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SEC)

    def _read(self) -> None:
        reader = Reader(ObservedRun(self._cluster, self._record))
        try:
            reader.start()
            while not self._is_closed.is_set() and time.monotonic() - self._wanted_at < IDLE_SEC:
                try:
                    self.read_once(reader)
                    self.problem = None
                except ClusterError as problem:  # may be temporary
                    self.problem = message(problem)
                    reader.renew()
                self._has_read.set()
                self._is_closed.wait(ROUND_SEC)
        except LlmtrainError as problem:  # not allowed to create pods, or the pod is unschedulable
            self._wait_after(problem.what, problem.remedy)
        except OSError as problem:  # of the copy
            self._wait_after(f"Cannot write the copy: {problem.strerror or problem}.", "Free some space in TMPDIR.")
        finally:
            try:
                reader.stop()
            except LlmtrainError:  # the pod has a deadline
                return

    def _wait_after(self, what: str, remedy: str | None) -> None:
        what = f"The curves of '{self.run.run_id}' cannot be read from its volume. {what}"
        self.problem = {"what": what, "remedy": remedy}
        self._has_read.set()
        self._is_closed.wait(RETRY_SEC)

    def read_once(self, reader: Reader) -> None:
        """Copy what has changed, and remove what is gone."""
        files = {file.path: file for file in reader.files() if _is_wanted(file)}
        changed = [file for file in files.values() if file != self._known.get(file.path)]
        requests = [FileRequest(file.path, self._begin(file), ANY) for file in changed]
        for response, blocks in reader.read_many(requests):
            if response.file is not None:
                self._write(response.path, response.offset, blocks)
                self._known[response.path] = files[response.path]
        for path in self._known.keys() - files.keys():
            (self.run.path / path).unlink(missing_ok=True)
            del self._known[path]

    def _begin(self, file: RemoteFile) -> int:
        """Where reading begins: at the end of the copy of a file to which rows are appended, unless it was replaced."""
        before = self._known.get(file.path)
        if before is None or file.path != _NAMES.metrics.name:
            return 0
        is_replaced = before.size > file.size or _inode(before) != _inode(file)
        return 0 if is_replaced else before.size

    def _write(self, path: str, offset: int, blocks: Iterator[bytes]) -> None:
        local = self.run.path / path
        local.parent.mkdir(parents=True, exist_ok=True)
        if offset:
            with local.open("r+b") as file:
                file.seek(offset)
                for block in blocks:
                    file.write(block)
            return
        temporary = local.with_name(f".{local.name}.part")
        with temporary.open("wb") as file:
            for block in blocks:
                file.write(block)
        temporary.replace(local)


def _inode(file: RemoteFile) -> str:
    return file.version.partition("-")[0]


def _is_wanted(file: RemoteFile) -> bool:
    parts = file.path.split("/")
    if any(part.startswith(".") for part in parts):
        return False
    if len(parts) == 1:
        return parts[0] in _FILES and (file.size <= MAX_BYTES or parts[0] == _NAMES.metrics.name)
    if parts[0] == _NAMES.checkpoints.name:
        return file.size <= MAX_BYTES and (parts[-1] == CHECKSUMS or (len(parts) == 2 and parts[1] in POINTERS))
    return parts[0] in _DIRECTORIES and len(parts) == 2 and file.size <= MAX_BYTES
