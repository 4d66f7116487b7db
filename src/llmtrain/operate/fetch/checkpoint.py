"""Downloading one checkpoint from the runs volume: complete and verified, or not at all."""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.core.files import file_sha256, fsync_dir, write_synced
from llmtrain.errors import CheckpointError
from llmtrain.operate.fetch.reader import Reader
from llmtrain.operate.fetch.transfer import FetchProgress, make_parent, part_size, receive, writing
from llmtrain.runs.checksums import CHECKSUMS, is_entry, is_whole
from llmtrain.runs.directory import RunDirectory


@dataclass(frozen=True)
class RemoteCheckpoint:
    name: str
    checksums: bytes
    files: dict[str, dict[str, Any]]
    """Name -> {"bytes", "sha256"} from manifest.json."""

    @property
    def bytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.files.values())


def read_checksums(name: str, text: bytes) -> RemoteCheckpoint:
    """Parse the checksums of a checkpoint on the volume."""
    try:
        files = dict(json.loads(text)["files"])
        is_valid = is_whole(text.decode(), files) and all(is_entry(entry) for entry in files.values())
    except (ValueError, KeyError, TypeError):
        is_valid = False
    if not is_valid:
        raise CheckpointError(f"{name}/{CHECKSUMS} on the runs volume is damaged.")
    return RemoteCheckpoint(name, text, files)


class CheckpointFetch:
    """Downloads checkpoints of one run."""

    def __init__(self, reader: Reader, run: RunDirectory, progress: FetchProgress) -> None:
        self._reader = reader
        self._run = run
        self._progress = progress
        self._verified: dict[str, bytes] = {}  # name -> checksums

    def is_complete(self, remote: RemoteCheckpoint) -> bool:
        """Whether the local copy is complete and verified."""
        if self._verified.get(remote.name) == remote.checksums:
            return True
        directory = self._run.checkpoints / remote.name
        try:
            is_same = not directory.is_symlink() and (directory / CHECKSUMS).read_bytes() == remote.checksums
        except OSError:
            return False
        if is_same and all(_matches(directory / file, entry) for file, entry in remote.files.items()):
            self._verified[remote.name] = remote.checksums
            return True
        return False

    def missing_bytes(self, remote: RemoteCheckpoint) -> int:
        """Bytes still to download, without those of earlier attempts."""
        temporary = self._temporary(remote)
        present = 0
        for file in remote.files:  # each is a partial file, or complete
            present += max(part_size(temporary / file), _size(temporary / file))
        return max(0, remote.bytes - present)

    def fetch(self, remote: RemoteCheckpoint) -> bool:
        """Download it. False if the run has deleted it in the meantime."""
        directory = self._run.checkpoints / remote.name
        temporary = self._temporary(remote)
        with writing(directory):
            make_parent(self._run.path, temporary)
            temporary.mkdir(exist_ok=True)
            for file, entry in remote.files.items():
                _reuse(directory / file, temporary / file, entry)
        # Twice, because a file may have been damaged on the way.
        for is_last in (False, True):
            missing = [file for file, entry in remote.files.items() if not _matches(temporary / file, entry)]
            if missing and not self._receive(remote, missing):
                shutil.rmtree(temporary, ignore_errors=True)
                return False
            damaged = [file for file in missing if not _matches(temporary / file, remote.files[file])]
            for file in damaged:
                (temporary / file).unlink(missing_ok=True)
            if not damaged:
                break
            if is_last:
                shutil.rmtree(temporary, ignore_errors=True)
                raise CheckpointError(
                    f"{remote.name}/{damaged[0]} of run '{self._run.run_id}' is damaged on the volume: its SHA-256 "
                    f"does not match {CHECKSUMS}, also after a second download.",
                    remedy="Use another checkpoint of the run; the intact ones were fetched.",
                )
        with writing(directory):
            _publish(temporary, directory, remote)
        self._progress.files += 1  # manifest.json
        self._verified[remote.name] = remote.checksums
        return True

    def _receive(self, remote: RemoteCheckpoint, files: list[str]) -> bool:
        temporary = self._temporary(remote)
        prefix = f"{self._run.checkpoints.name}/{remote.name}"
        paths = {f"{prefix}/{file}": temporary / file for file in files}
        received = receive(self._reader, self._run.path, paths, self._progress)
        return all(received.values())  # None for a file that no longer exists

    def remove_leftovers(self) -> None:
        """Delete what earlier attempts left of checkpoints that the run deleted, or that were replaced locally."""
        for path in list(self._run.checkpoints.glob(".tmp-step_*-fetch")):
            shutil.rmtree(path, ignore_errors=True)
        for path in list(self._run.checkpoints.glob(".old-step_*")):
            if path.with_name(path.name.removeprefix(".old-")).is_dir():
                shutil.rmtree(path, ignore_errors=True)

    def _temporary(self, remote: RemoteCheckpoint) -> Path:
        return self._run.checkpoints / f".tmp-{remote.name}-fetch"  # training in this directory would delete this name


def _reuse(local: Path, target: Path, entry: dict[str, Any]) -> None:
    """Link an intact file of a damaged local checkpoint instead of downloading it again."""
    if not target.exists() and _matches(local, entry):
        target.parent.mkdir(exist_ok=True)
        with suppress(OSError):  # some file systems have no hard links
            os.link(local, target)


def _matches(path: Path, entry: dict[str, Any]) -> bool:
    """Whether size and SHA-256 are those of manifest.json."""
    try:
        if path.is_symlink() or path.stat().st_size != entry["bytes"]:
            return False
        return file_sha256(path) == str(entry["sha256"])
    except OSError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _publish(temporary: Path, directory: Path, remote: RemoteCheckpoint) -> None:
    """Write manifest.json last, then rename, as a save does."""
    expected = {temporary / file for file in remote.files}
    for path in list(temporary.rglob("*")):
        if path.is_file() and path not in expected:  # of an earlier attempt
            path.unlink()
    for file in remote.files:
        with (temporary / file).open("rb") as written:
            os.fsync(written.fileno())
    write_synced(temporary / CHECKSUMS, remote.checksums)
    fsync_dir(temporary)
    old = directory.with_name(f".old-{directory.name}")
    if directory.is_symlink():
        directory.unlink()
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    temporary.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
    fsync_dir(directory.parent)
