"""Downloading a run from the cluster into a local run directory.

The order matters, because a download may be interrupted anywhere: first the files that identify the run, then those a
model needs, then checkpoints, then metrics and logs; pointers and finished.json last, and only if their checkpoint has
been fetched. So the local directory is usable at any moment, and the same call again continues.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from llmtrain.errors import CheckpointError, UsageError
from llmtrain.files import write_atomic
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch.record import Record
from llmtrain.operate.fetch.checkpoint import CheckpointFetch, RemoteCheckpoint, read_manifest
from llmtrain.operate.fetch.choice import (
    CHECKPOINTS,
    FINISHED,
    GENERATIONS,
    IDENTITY,
    META,
    POINTERS,
    Only,
    checkpoint_of,
    is_appended,
    is_link,
    is_plain,
    is_selected,
)
from llmtrain.operate.fetch.local_run import check_local, check_same
from llmtrain.operate.fetch.reader import FileRequest, Reader, RemoteFile, reader_pod
from llmtrain.operate.fetch.transfer import FetchProgress, make_parent, part_size, receive, retry, writing
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.manifest import MANIFEST, step_of

MAX_ROUNDS = 3  # an active run may delete the checkpoint it points to while it is being read
MIN_FREE_BYTES = 64 * 2**20


def fetch_run(
    cluster: Cluster,
    record: Record,
    to: Path,
    only: Only = "all",
    show: Callable[[FetchProgress], None] = lambda _: None,
) -> dict[str, Any]:
    """Download a run, or a part of it, to `to/<run id>`. Calling it again downloads what is new and continues what was
    interrupted."""
    started = time.monotonic()
    run = RunDirectory(to / record.run_id)
    check_local(run)
    progress = FetchProgress(show)
    with reader_pod(cluster, record) as reader:
        fetch = _Fetch(reader, run, only, progress)
        for _ in range(MAX_ROUNDS):
            if fetch.run_round(record):
                break
    if fetch.damaged:
        raise fetch.damaged[0]
    if only == "best" and not fetch.steps:
        raise CheckpointError(
            f"Run '{run.run_id}' deleted its checkpoints while they were being fetched.", remedy="Try again."
        )
    return {
        "run_id": record.run_id,
        "path": str(run.path),
        "only": only,
        "files": progress.files,
        "bytes": progress.received,
        "skipped": progress.skipped,
        "checkpoints": [f"step_{step}" for step in sorted(fetch.steps)],
        "is_finished": run.finished.is_file(),
        "seconds": round(time.monotonic() - started, 2),
    }


class _Fetch:
    def __init__(self, reader: Reader, run: RunDirectory, only: Only, progress: FetchProgress) -> None:
        self._reader, self._run, self._only, self._progress = reader, run, only, progress
        self._checkpoints = CheckpointFetch(reader, run, progress)
        self._skipped: set[str] = set()
        self.steps: set[int] = set()
        """Steps of the checkpoints that are complete locally."""
        self.damaged: list[CheckpointError] = []

    def run_round(self, record: Record) -> bool:
        """False if the run deleted a checkpoint it had pointed to: it has a newer one by now."""
        # Pointers are read before the listing, so that the listing contains what they name.
        small = self._read([META, GENERATIONS, *POINTERS.values()])
        listing = retry(self._reader, self._reader.files)
        files = [file for file in listing if is_selected(file.path, self._only)]
        if not files:
            raise UsageError(
                f"Run '{record.run_id}' has no files on claim {record.runs_claim} yet.",
                remedy=f"Check that it has started: llmtrain status {self._reader.run}. If its files are on another "
                "claim, pass --claim.",
            )
        check_same(self._run, small.get(META), small.get(GENERATIONS))
        pointers = {
            name: small[path].decode("utf-8", "replace").strip() for name, path in POINTERS.items() if path in small
        }
        self.damaged = []
        checkpoints = self._select_checkpoints(files, pointers)
        with _exclusive(self._run):
            self._check_disk_space(files, checkpoints)
            self._fetch_all(files, checkpoints)
            self._write_pointers(pointers)
            is_lost = any(step_of(name) not in self.steps for name in self._required(pointers))
            # finished.json marks the run as complete, so it must not be written without its checkpoints.
            if not is_lost and (checkpoints or self._only == "metrics"):
                self._fetch_files([file for file in files if file.path == FINISHED])
            if self._only == "all" and not is_lost:
                self._clean_up({step_of(name) or 0 for file in files if (name := checkpoint_of(file.path))})
        return not is_lost or bool(self.damaged)

    def _fetch_all(self, files: list[RemoteFile], checkpoints: list[RemoteCheckpoint]) -> None:
        plain = [file for file in files if is_plain(file.path)]
        self._fetch_files([file for file in plain if file.path in IDENTITY])
        others = [file for file in plain if file.path not in IDENTITY]
        self._fetch_files([file for file in others if not is_link(file.path) and not is_appended(file.path)])
        self._fetch_checkpoints(checkpoints)
        self._fetch_files([file for file in others if is_link(file.path)], self._linkable(files))
        self._fetch_files([file for file in others if is_appended(file.path)])

    def _required(self, pointers: dict[str, str]) -> list[str]:
        """The checkpoint without which the fetch is incomplete."""
        names = {"all": pointers.get("latest"), "best": pointers.get("best") or pointers.get("latest")}
        return [name for name in [names.get(self._only)] if name]

    def _select_checkpoints(self, files: list[RemoteFile], pointers: dict[str, str]) -> list[RemoteCheckpoint]:
        """Complete checkpoints to fetch: the best first, then the newest, which the run keeps longest."""
        if self._only not in ("all", "best"):
            return []
        names = {name for file in files if (name := checkpoint_of(file.path))}
        best = pointers.get("best") or pointers.get("latest")
        if self._only == "best":
            names &= {best or ""}
            if best is None:
                raise UsageError(f"Run '{self._run.run_id}' has no checkpoint yet.", remedy="Fetch it later.")
        manifests = self._read([f"{CHECKPOINTS}/{name}/{MANIFEST}" for name in names])
        checkpoints = []
        for path, text in manifests.items():
            try:
                checkpoints.append(read_manifest(path.split("/")[1], text))
            except CheckpointError as problem:
                self.damaged.append(problem)
        return sorted(checkpoints, key=lambda each: (each.name != best, -(step_of(each.name) or 0)))

    def _fetch_files(self, files: list[RemoteFile], linkable: dict[str, Path] | None = None) -> None:
        new = []
        for file in files:
            if self._is_same(file):
                self._skipped.add(file.path)
            elif not (linkable and self._link(linkable.get(file.version), self._run.path / file.path)):
                new.append(file.path)
        self._progress.skipped = len(self._skipped)
        appended = frozenset(path for path in new if is_appended(path))
        receive(self._reader, self._run.path, {path: self._run.path / path for path in new}, self._progress, appended)

    def _fetch_checkpoints(self, checkpoints: list[RemoteCheckpoint]) -> None:
        for checkpoint in checkpoints:
            try:
                if self._checkpoints.is_complete(checkpoint):
                    self._skipped |= {f"{checkpoint.name}/{file}" for file in (MANIFEST, *checkpoint.files)}
                elif not self._checkpoints.fetch(checkpoint):
                    continue
            except CheckpointError as problem:
                self.damaged.append(problem)
            else:
                self.steps.add(step_of(checkpoint.name) or 0)

    def _linkable(self, files: list[RemoteFile]) -> dict[str, Path]:
        """Version -> local path of checkpoint files, which best/ and epoch-N/ share and need not download again."""
        names = {f"step_{step}" for step in self.steps}
        return {file.version: self._run.path / file.path for file in files if checkpoint_of(file.path) in names}

    def _link(self, source: Path | None, target: Path) -> bool:
        if source is None or not source.is_file():
            return False
        make_parent(self._run.path, target)
        try:
            target.unlink(missing_ok=True)
            target.hardlink_to(source)
        except OSError:  # some file systems have no hard links: download it instead
            return False
        return True

    def _write_pointers(self, pointers: dict[str, str]) -> None:
        """Write `latest` and `best` if their checkpoint was fetched; else `latest` names the newest one fetched."""
        valid = {pointer: name for pointer, name in pointers.items() if step_of(name) in self.steps}
        if "latest" in pointers and self._only == "all" and self.steps:
            valid.setdefault("latest", f"step_{max(self.steps)}")
        for pointer, name in valid.items():
            with writing(self._run.checkpoints):
                write_atomic(self._run.checkpoints / pointer, f"{name}\n")

    def _clean_up(self, remote_steps: set[int]) -> None:
        """Delete leftovers of earlier attempts. If the run was resumed from an older step, rename newer checkpoints to
        superseded-step_N, as training does."""
        self._checkpoints.remove_leftovers()
        for path in list(self._run.path.rglob(".*.part")):
            path.unlink(missing_ok=True)
        steps = {path: step_of(path.name) for path in self._run.checkpoints.glob("step_*")}
        for path, step in steps.items():
            if remote_steps and step is not None and step > max(remote_steps):
                superseded = path.with_name(f"superseded-{path.name}")
                shutil.rmtree(superseded, ignore_errors=True)
                path.rename(superseded)

    def _check_disk_space(self, files: list[RemoteFile], checkpoints: list[RemoteCheckpoint]) -> None:
        new = [file for file in files if checkpoint_of(file.path) is None and not self._is_same(file)]
        needed = sum(max(0, file.size - part_size(self._run.path / file.path)) for file in new)
        missing = [each for each in checkpoints if not self._checkpoints.is_complete(each)]
        needed += sum(self._checkpoints.missing_bytes(each) for each in missing)
        self._progress.expected = self._progress.received + needed
        free = shutil.disk_usage(self._run.path).free
        if free < needed + MIN_FREE_BYTES:
            raise UsageError(
                f"Not enough disk space in {self._run.path.parent}: {needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB "
                "free.",
                remedy="Free some space, choose another directory with --to, or fetch less with --only best.",
            )

    def _is_same(self, file: RemoteFile) -> bool:
        try:
            local = (self._run.path / file.path).lstat()
        except OSError:
            return False
        return (local.st_size, local.st_mtime_ns) == (file.size, file.mtime_ns)

    def _read(self, paths: list[str]) -> dict[str, bytes]:
        """Contents of small files, without those that do not exist."""

        def attempt() -> dict[str, bytes]:
            responses = self._reader.read_many([FileRequest(path) for path in paths])
            return {each.path: b"".join(blocks) for each, blocks in responses if each.file is not None}

        return retry(self._reader, attempt)


@contextmanager
def _exclusive(run: RunDirectory) -> Iterator[None]:
    """Allow one fetch at a time into a directory."""
    lock = FileLock(run.path / ".fetch.lock")
    with writing(run.path):
        run.path.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UsageError(f"Another fetch is writing to {run.path}.", remedy="Wait until it ends.") from None
    try:
        yield
    finally:
        lock.release()
