"""A run of the cluster as a run directory on this machine.

Order matters, as it may break off anywhere: first what says whose directory this is, then what a model needs, then
checkpoints, then metrics and logs; the pointers and finished.json last, and only where their checkpoint is here. So
what is here can be used at any moment, and the same call again goes on.
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
from llmtrain.operate.fetch.checkpoint import CheckpointFetch, FarCheckpoint, read_manifest
from llmtrain.operate.fetch.choice import (
    CHECKPOINTS,
    FINISHED,
    GENERATIONS,
    META,
    POINTERS,
    WHO,
    Only,
    checkpoint_of,
    is_growing,
    is_link,
    is_plain,
    is_wanted,
)
from llmtrain.operate.fetch.local_run import check_local, check_same
from llmtrain.operate.fetch.reader import Reader, RemoteFile, Wanted, reader_pod
from llmtrain.operate.fetch.transfer import Tally, make_parent, part_size, persist, receive, writing
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.manifest import MANIFEST, step_of

ROUNDS = 3  # a run that goes on may remove what it points to while we read it
ROOM = 64 * 2**20  # bytes to leave free on the disk


def fetch_run(
    cluster: Cluster, record: Record, to: Path, only: Only = "all", show: Callable[[Tally], None] = lambda _: None
) -> dict[str, Any]:
    """Bring a run, or a part of it, to `to/<run id>`. Calling it again brings what is new, or goes on where it broke
    off."""
    began = time.monotonic()
    run = RunDirectory(to / record.run_id)
    check_local(run)
    tally = Tally(show)
    with reader_pod(cluster, record) as reader:
        fetch = _Fetch(reader, run, only, tally)
        for _ in range(ROUNDS):
            if fetch.bring(record):
                break
    if fetch.damaged:
        raise fetch.damaged[0]
    if only == "best" and not fetch.steps:
        raise CheckpointError(f"Run '{run.run_id}' removed its checkpoints faster than they came.", remedy="Try again.")
    return {
        "run_id": record.run_id,
        "path": str(run.path),
        "only": only,
        "files": tally.files,
        "bytes": tally.received,
        "skipped": tally.skipped,
        "checkpoints": [f"step_{step}" for step in sorted(fetch.steps)],
        "is_finished": run.finished.is_file(),
        "seconds": round(time.monotonic() - began, 2),
    }


class _Fetch:
    def __init__(self, reader: Reader, run: RunDirectory, only: Only, tally: Tally) -> None:
        self._reader, self._run, self._only, self._tally = reader, run, only, tally
        self._checkpoints = CheckpointFetch(reader, run, tally)
        self._skipped: set[str] = set()
        self.steps: set[int] = set()
        """Checkpoints that are here, of those the run has."""
        self.damaged: list[CheckpointError] = []

    def bring(self, record: Record) -> bool:
        """One round. False where a checkpoint that is pointed to was removed meanwhile: the run has a newer one."""
        small = self._read([META, GENERATIONS, *POINTERS.values()])  # before the list, which then has what they name
        listed = persist(self._reader, self._reader.files)
        files = [file for file in listed if is_wanted(file.path, self._only)]
        if not files:
            raise UsageError(
                f"Run '{record.run_id}' has no files on the claim {record.runs_claim} yet.",
                remedy=f"Has it started? llmtrain status {self._reader.run} tells. Files on another claim are found "
                "with --claim.",
            )
        check_same(self._run, small.get(META), small.get(GENERATIONS))
        pointed = {
            name: small[path].decode("utf-8", "replace").strip() for name, path in POINTERS.items() if path in small
        }
        self.damaged = []
        far = self._choose(files, pointed)
        with _alone(self._run):
            self._check_room(files, far)
            self._bring_all(files, far)
            self._point(pointed)
            is_lost = any(step_of(name) not in self.steps for name in self._needed(pointed))
            # The result says `finished`: not where checkpoints should be and are not.
            if not is_lost and (far or self._only == "metrics"):
                self._bring_files([file for file in files if file.path == FINISHED])
            if self._only == "all" and not is_lost:
                self._tidy({step_of(name) or 0 for file in files if (name := checkpoint_of(file.path))})
        return not is_lost or bool(self.damaged)

    def _bring_all(self, files: list[RemoteFile], far: list[FarCheckpoint]) -> None:
        plain = [file for file in files if is_plain(file.path)]
        self._bring_files([file for file in plain if file.path in WHO])
        others = [file for file in plain if file.path not in WHO]
        self._bring_files([file for file in others if not is_link(file.path) and not is_growing(file.path)])
        self._bring_checkpoints(far)
        self._bring_files([file for file in others if is_link(file.path)], self._linkable(files))
        self._bring_files([file for file in others if is_growing(file.path)])

    def _needed(self, pointed: dict[str, str]) -> list[str]:
        """The checkpoint that this fetch is about."""
        names = {"all": pointed.get("latest"), "best": pointed.get("best") or pointed.get("latest")}
        return [name for name in [names.get(self._only)] if name]

    def _choose(self, files: list[RemoteFile], pointed: dict[str, str]) -> list[FarCheckpoint]:
        """Complete checkpoints to bring: the best first, then the newest, which the run keeps longest."""
        if self._only not in ("all", "best"):
            return []
        names = {name for file in files if (name := checkpoint_of(file.path))}
        best = pointed.get("best") or pointed.get("latest")
        if self._only == "best":
            names &= {best or ""}
            if best is None:
                raise UsageError(f"Run '{self._run.run_id}' has no checkpoint yet.", remedy="Fetch it later.")
        manifests = self._read([f"{CHECKPOINTS}/{name}/{MANIFEST}" for name in names])
        chosen = []
        for path, text in manifests.items():
            try:
                chosen.append(read_manifest(path.split("/")[1], text))
            except CheckpointError as problem:
                self.damaged.append(problem)
        return sorted(chosen, key=lambda row: (row.name != best, -(step_of(row.name) or 0)))

    def _bring_files(self, files: list[RemoteFile], linkable: dict[str, Path] | None = None) -> None:
        new = []
        for file in files:
            if self._is_same(file):
                self._skipped.add(file.path)
            elif not (linkable and self._link(linkable.get(file.version), self._run.path / file.path)):
                new.append(file.path)
        self._tally.skipped = len(self._skipped)
        growing = frozenset(path for path in new if is_growing(path))
        receive(self._reader, self._run.path, {path: self._run.path / path for path in new}, self._tally, growing)

    def _bring_checkpoints(self, far: list[FarCheckpoint]) -> None:
        for checkpoint in far:
            try:
                if self._checkpoints.is_here(checkpoint):
                    self._skipped |= {f"{checkpoint.name}/{file}" for file in (MANIFEST, *checkpoint.files)}
                elif not self._checkpoints.fetch(checkpoint):
                    continue
            except CheckpointError as problem:
                self.damaged.append(problem)
            else:
                self.steps.add(step_of(checkpoint.name) or 0)

    def _linkable(self, files: list[RemoteFile]) -> dict[str, Path]:
        """Version -> where that file is here. What best/ and epoch-N/ share with checkpoints comes once."""
        here = {f"step_{step}" for step in self.steps}
        return {file.version: self._run.path / file.path for file in files if checkpoint_of(file.path) in here}

    def _link(self, source: Path | None, target: Path) -> bool:
        if source is None or not source.is_file():
            return False
        make_parent(self._run.path, target)
        try:
            target.unlink(missing_ok=True)
            target.hardlink_to(source)
        except OSError:  # some storage knows no hard links: then it comes over the line
            return False
        return True

    def _point(self, pointed: dict[str, str]) -> None:
        """`latest` and `best`, where what they name is here; else `latest` names the newest that is."""
        here = {pointer: name for pointer, name in pointed.items() if step_of(name) in self.steps}
        if "latest" in pointed and self._only == "all" and self.steps:
            here.setdefault("latest", f"step_{max(self.steps)}")
        for pointer, name in here.items():
            with writing(self._run.checkpoints):
                write_atomic(self._run.checkpoints / pointer, f"{name}\n")

    def _tidy(self, far: set[int]) -> None:
        """Once all is here: leftovers of earlier attempts go, and checkpoints of a course that the run has left (it
        went back to an older step) are set aside, as the run does it."""
        self._checkpoints.tidy()
        for path in list(self._run.path.rglob(".*.part")):
            path.unlink(missing_ok=True)
        steps = {path: step_of(path.name) for path in self._run.checkpoints.glob("step_*")}
        for path, step in steps.items():
            if far and step is not None and step > max(far):
                aside = path.with_name(f"superseded-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)

    def _check_room(self, files: list[RemoteFile], far: list[FarCheckpoint]) -> None:
        new = [file for file in files if checkpoint_of(file.path) is None and not self._is_same(file)]
        needed = sum(max(0, file.size - part_size(self._run.path / file.path)) for file in new)
        needed += sum(self._checkpoints.missing_bytes(row) for row in far if not self._checkpoints.is_here(row))
        self._tally.expected = self._tally.received + needed
        free = shutil.disk_usage(self._run.path).free
        if free < needed + ROOM:
            raise UsageError(
                f"There is not enough room in {self._run.path.parent}: {needed / 1e6:.0f} MB are to come, "
                f"{free / 1e6:.0f} MB are free.",
                remedy="Make room, name another place with --to, or fetch less with --only best.",
            )

    def _is_same(self, file: RemoteFile) -> bool:
        try:
            found = (self._run.path / file.path).lstat()
        except OSError:
            return False
        return (found.st_size, found.st_mtime_ns) == (file.size, file.mtime_ns)

    def _read(self, paths: list[str]) -> dict[str, bytes]:
        """Small files at once, as far as they are there."""

        def attempt() -> dict[str, bytes]:
            rows = self._reader.read_many([Wanted(path) for path in paths])
            return {sent.path: b"".join(blocks) for sent, blocks in rows if sent.file is not None}

        return persist(self._reader, attempt)


@contextmanager
def _alone(run: RunDirectory) -> Iterator[None]:
    """One fetch into a directory at a time."""
    guard = FileLock(run.path / ".fetch.lock")
    with writing(run.path):
        run.path.mkdir(parents=True, exist_ok=True)
        try:
            guard.acquire(timeout=0)
        except Timeout:
            raise UsageError(f"Another fetch is writing to {run.path}.", remedy="Wait for it.") from None
    try:
        yield
    finally:
        guard.release()
