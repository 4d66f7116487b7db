"""Downloading a run from the cluster into a local run directory.

The order matters, because a download may be interrupted anywhere: first the files that identify the run, then those a
model needs, then checkpoints, then metrics and logs; pointers and finished.json last, and only if their checkpoint has
been fetched. So the local directory is usable at any moment, and the same call again continues.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from llmtrain.core.files import write_atomic
from llmtrain.errors import CheckpointError, UsageError
from llmtrain.operate.fetch.checkpoint import CheckpointFetch, RemoteCheckpoint, read_checksums
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
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.runs.checksums import CHECKSUMS, step_of
from llmtrain.runs.directory import RunDirectory

MAX_ROUNDS = 3  # an active run may delete the checkpoint it points to while it is being read
MIN_FREE_BYTES = 64 * 2**20  # left on the disk: metrics and logs grow while they are downloaded


@dataclass(frozen=True)
class FetchResult:
    """A run that was downloaded. The fields are those of `llmtrain fetch --json`."""

    run_id: str
    path: str
    only: str
    files: int
    bytes: int
    skipped: int
    """Files that were already up to date."""
    checkpoints: list[str]
    is_finished: bool
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def fetch_run(
    observed: ObservedRun,
    to: Path,
    only: Only = "all",
    show: Callable[[FetchProgress], None] = lambda _: None,
) -> FetchResult:
    """Download a run, or a part of it, to `to/<run id>`. Calling it again downloads what is new and continues what was
    interrupted."""
    started = time.monotonic()
    run = RunDirectory(to / observed.run_id)
    check_local(run)
    progress = FetchProgress(show)
    with reader_pod(observed) as reader:
        fetch = _Fetch(reader, run, only, progress)
        for _ in range(MAX_ROUNDS):
            is_done = fetch.run_round()
            if is_done:
                break
    if fetch.damaged:
        raise fetch.damaged[0]
    if only == "best" and not fetch.steps:
        raise CheckpointError(
            f"Run '{run.run_id}' deleted its checkpoints while they were being fetched.", remedy="Try again."
        )
    return FetchResult(
        run_id=observed.run_id,
        path=str(run.path),
        only=only,
        files=progress.files,
        bytes=progress.received,
        skipped=progress.skipped,
        checkpoints=[f"step_{step}" for step in sorted(fetch.steps)],
        is_finished=run.finished.is_file(),
        seconds=round(time.monotonic() - started, 2),
    )


class _Fetch:
    def __init__(self, reader: Reader, run: RunDirectory, only: Only, progress: FetchProgress) -> None:
        self._reader = reader
        self._run = run
        self._only = only
        self._progress = progress
        self._checkpoints = CheckpointFetch(reader, run, progress)
        self._skipped: set[str] = set()
        self.steps: set[int] = set()
        """Steps of the checkpoints that are complete locally."""
        self.damaged: list[CheckpointError] = []

    def run_round(self) -> bool:
        """Fetch everything once. False if the run meanwhile deleted a checkpoint that it had pointed to: it has a newer
        one by now, for another round. A damaged checkpoint would still be damaged, so there is none after that."""
        # Pointers are read before the listing, so that the listing contains what they name.
        small = self._read([META, GENERATIONS, *POINTERS.values()])
        listing = retry(self._reader, self._reader.files)
        files = [file for file in listing if is_selected(file.path, self._only)]
        if not files:
            raise UsageError(
                f"Run '{self._run.run_id}' has no files on claim {self._reader.run.record.runs_claim} yet.",
                remedy=f"Check that it has started: llmtrain status {self._reader.run.in_commands}. If its files are "
                "on another claim, pass --claim.",
            )
        check_same(self._run, small.get(META), small.get(GENERATIONS))
        pointers = {}  # latest and best -> the checkpoint that each names
        for name, path in POINTERS.items():
            if path in small:
                pointers[name] = small[path].decode("utf-8", "replace").strip()
        self.damaged = []
        checkpoints = self._select_checkpoints(files, pointers)
        with _exclusive(self._run):
            self._check_disk_space(files, checkpoints)
            self._fetch_all(files, checkpoints)
            self._write_pointers(pointers)
            required = self._required(pointers)
            is_complete = required is None or step_of(required) in self.steps
            # finished.json marks the run as complete, so it must not be written without its checkpoints.
            if is_complete and (checkpoints or self._only == "metrics"):
                self._fetch_files([file for file in files if file.path == FINISHED])
            if is_complete and self._only == "all":
                self._clean_up({step_of(name) or 0 for name in _checkpoints_of(files)})
        return is_complete or bool(self.damaged)

    def _fetch_all(self, files: list[RemoteFile], checkpoints: list[RemoteCheckpoint]) -> None:
        groups: dict[str, list[RemoteFile]] = {"identity": [], "link": [], "appended": [], "other": []}
        for file in files:
            if is_plain(file.path):
                groups[_group_of(file.path)].append(file)
        self._fetch_files(groups["identity"])
        self._fetch_files(groups["other"])
        self._fetch_checkpoints(checkpoints)
        self._fetch_files(groups["link"], self._linkable(files))
        self._fetch_files(groups["appended"])

    def _required(self, pointers: dict[str, str]) -> str | None:
        """The checkpoint without which the fetch is incomplete."""
        if self._only == "all":
            return pointers.get("latest") or None
        if self._only == "best":
            return pointers.get("best") or pointers.get("latest") or None
        return None

    def _select_checkpoints(self, files: list[RemoteFile], pointers: dict[str, str]) -> list[RemoteCheckpoint]:
        """Complete checkpoints to fetch: the best first, then the newest, which the run keeps longest."""
        if self._only not in ("all", "best"):
            return []
        names = _checkpoints_of(files)
        best = pointers.get("best") or pointers.get("latest")
        if self._only == "best":
            if best is None:
                raise UsageError(f"Run '{self._run.run_id}' has no checkpoint yet.", remedy="Fetch it later.")
            names &= {best}
        texts = self._read([f"{CHECKPOINTS}/{name}/{CHECKSUMS}" for name in names])
        checkpoints = []
        for path, text in texts.items():
            try:
                checkpoints.append(read_checksums(path.split("/")[1], text))
            except CheckpointError as problem:
                self.damaged.append(problem)

        def order(each: RemoteCheckpoint) -> tuple[bool, int]:
            return each.name != best, -(step_of(each.name) or 0)

        return sorted(checkpoints, key=order)

    def _fetch_files(self, files: list[RemoteFile], linkable: dict[str, Path] | None = None) -> None:
        """`linkable`: version -> a local file with the same bytes."""
        new = {}
        for file in files:
            local = self._run.path / file.path
            if self._is_same(file):
                self._skipped.add(file.path)
            elif not (linkable and self._link(linkable.get(file.version), local)):
                new[file.path] = local
        self._progress.skipped = len(self._skipped)
        appended = frozenset(filter(is_appended, new))
        receive(self._reader, self._run.path, new, self._progress, appended)

    def _fetch_checkpoints(self, checkpoints: list[RemoteCheckpoint]) -> None:
        for checkpoint in checkpoints:
            try:
                if self._checkpoints.is_complete(checkpoint):
                    self._skipped |= {f"{checkpoint.name}/{file}" for file in (CHECKSUMS, *checkpoint.files)}
                elif not self._checkpoints.fetch(checkpoint):
                    continue
            except CheckpointError as problem:
                self.damaged.append(problem)
            else:
                self.steps.add(step_of(checkpoint.name) or 0)

    def _linkable(self, files: list[RemoteFile]) -> dict[str, Path]:
        """Version -> local path of checkpoint files, which best/ and epoch-N/ share and need not download again."""
        names = {f"step_{step}" for step in self.steps}
        linkable = {}
        for file in files:
            if checkpoint_of(file.path) in names:
                linkable[file.version] = self._run.path / file.path
        return linkable

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
        valid = {}
        for pointer, name in pointers.items():
            if step_of(name) in self.steps:
                valid[pointer] = name
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
        if not remote_steps:
            return
        for path in list(self._run.checkpoints.glob("step_*")):  # a list: the names change meanwhile
            step = step_of(path.name)
            if step is not None and step > max(remote_steps):
                superseded = path.with_name(f"superseded-{path.name}")
                shutil.rmtree(superseded, ignore_errors=True)
                path.rename(superseded)

    def _check_disk_space(self, files: list[RemoteFile], checkpoints: list[RemoteCheckpoint]) -> None:
        needed = 0
        for file in files:
            if checkpoint_of(file.path) is None and not self._is_same(file):
                needed += max(0, file.size - part_size(self._run.path / file.path))
        for checkpoint in checkpoints:
            if not self._checkpoints.is_complete(checkpoint):
                needed += self._checkpoints.missing_bytes(checkpoint)
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


def _group_of(path: str) -> str:
    """When a file is fetched."""
    if path in IDENTITY:
        return "identity"
    if is_link(path):
        return "link"
    if is_appended(path):
        return "appended"
    return "other"


def _checkpoints_of(files: list[RemoteFile]) -> set[str]:
    """Names of the checkpoints that these files belong to."""
    names = set()
    for file in files:
        name = checkpoint_of(file.path)
        if name is not None:
            names.add(name)
    return names


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
