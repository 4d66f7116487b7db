"""Downloading one checkpoint from the runs volume: complete and verified, or not at all."""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.errors import CheckpointError
from llmtrain.files import file_sha256, fsync_dir, write_synced
from llmtrain.operate.fetch.reader import Reader
from llmtrain.operate.fetch.transfer import FetchProgress, make_parent, part_size, receive, writing
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.manifest import MANIFEST, is_entry, is_whole


@dataclass(frozen=True)
class RemoteCheckpoint:
    name: str
    manifest: bytes
    files: dict[str, dict[str, Any]]
    """Name -> {"bytes", "sha256"} from the manifest."""

    @property
    def bytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.files.values())


def read_manifest(name: str, text: bytes) -> RemoteCheckpoint:
    """Parse the manifest of a checkpoint on the volume."""
    try:
        files = dict(json.loads(text)["files"])
        is_valid = is_whole(text.decode(), files) and all(is_entry(entry) for entry in files.values())
    except (ValueError, KeyError, TypeError):
        is_valid = False
    if not is_valid:
        raise CheckpointError(f"{name}/{MANIFEST} on the runs volume is damaged.")
    return RemoteCheckpoint(name, text, files)


class CheckpointFetch:
    """Downloads checkpoints of one run."""

    def __init__(self, reader: Reader, run: RunDirectory, progress: FetchProgress) -> None:
        self._reader, self._run, self._progress = reader, run, progress
        self._verified: dict[str, bytes] = {}  # name -> manifest

    def is_complete(self, remote: RemoteCheckpoint) -> bool:
        """Whether the local copy is complete and verified."""
        if self._verified.get(remote.name) == remote.manifest:
            return True
        directory = self._run.checkpoints / remote.name
        try:
            is_same = not directory.is_symlink() and (directory / MANIFEST).read_bytes() == remote.manifest
        except OSError:
            return False
        if is_same and all(_matches(directory / file, entry) for file, entry in remote.files.items()):
            self._verified[remote.name] = remote.manifest
            return True
        return False

    def missing_bytes(self, remote: RemoteCheckpoint) -> int:
        """Bytes still to download, without those of earlier attempts."""
        temporary = self._temporary(remote)
        present = (max(part_size(temporary / file), _size(temporary / file)) for file in remote.files)
        return max(0, remote.bytes - sum(present))

    def fetch(self, remote: RemoteCheckpoint) -> bool:
        """Download it. False if the run has deleted it in the meantime."""
        directory, temporary = self._run.checkpoints / remote.name, self._temporary(remote)
        with writing(directory):
            make_parent(self._run.path, temporary)
            temporary.mkdir(exist_ok=True)
            for file, entry in remote.files.items():
                _reuse(directory / file, temporary / file, entry)
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
                    f"does not match {MANIFEST}, also after a second download.",
                    remedy="Use another checkpoint of the run; the intact ones were fetched.",
                )
        with writing(directory):
            _publish(temporary, directory, remote)
        self._progress.files += 1  # the manifest
        self._verified[remote.name] = remote.manifest
        return True

    def _receive(self, remote: RemoteCheckpoint, files: list[str]) -> bool:
        temporary = self._temporary(remote)
        prefix = f"{self._run.checkpoints.name}/{remote.name}"
        received = receive(
            self._reader, self._run.path, {f"{prefix}/{file}": temporary / file for file in files}, self._progress
        )
        return all(received.values())

    def remove_leftovers(self) -> None:
        """Delete what earlier attempts left of checkpoints that the run deleted, or that were replaced locally."""
        replaced = [
            path
            for path in self._run.checkpoints.glob(".old-step_*")
            if path.with_name(path.name.removeprefix(".old-")).is_dir()
        ]
        for path in (*self._run.checkpoints.glob(".tmp-step_*-fetch"), *replaced):
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
    """Whether size and SHA-256 are those of the manifest."""
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
    """Write the manifest last, then rename, as a save does."""
    unexpected = {path for path in temporary.rglob("*") if path.is_file()} - {temporary / file for file in remote.files}
    for path in unexpected:
        path.unlink()
    for file in remote.files:
        with (temporary / file).open("rb") as written:
            os.fsync(written.fileno())
    write_synced(temporary / MANIFEST, remote.manifest)
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
