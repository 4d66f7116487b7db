"""One checkpoint from the runs volume to this machine: whole and checked, or not at all."""

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
from llmtrain.operate.fetch.transfer import Tally, make_parent, part_size, receive, writing
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.manifest import MANIFEST, is_entry, is_whole


@dataclass(frozen=True)
class FarCheckpoint:
    name: str
    manifest: bytes
    files: dict[str, dict[str, Any]]
    """Name -> {"bytes", "sha256"}, as the manifest says."""

    @property
    def bytes(self) -> int:
        return sum(int(row["bytes"]) for row in self.files.values())


def read_manifest(name: str, text: bytes) -> FarCheckpoint:
    """The checkpoint that a manifest describes, or an error."""
    try:
        files = dict(json.loads(text)["files"])
        is_sound = is_whole(text.decode(), files) and all(is_entry(row) for row in files.values())
    except (ValueError, KeyError, TypeError):
        is_sound = False
    if not is_sound:
        raise CheckpointError(f"{name}/{MANIFEST} on the runs volume is damaged.")
    return FarCheckpoint(name, text, files)


class CheckpointFetch:
    """Brings checkpoints of one run."""

    def __init__(self, reader: Reader, run: RunDirectory, tally: Tally) -> None:
        self._reader, self._run, self._tally = reader, run, tally
        self._whole: dict[str, bytes] = {}  # name -> manifest of those that were checked

    def is_here(self, far: FarCheckpoint) -> bool:
        """Whether it is here already, every byte of it."""
        if self._whole.get(far.name) == far.manifest:
            return True
        folder = self._run.checkpoints / far.name
        try:
            same = not folder.is_symlink() and (folder / MANIFEST).read_bytes() == far.manifest
        except OSError:
            return False
        if same and all(_is_right(folder / file, row) for file, row in far.files.items()):
            self._whole[far.name] = far.manifest
            return True
        return False

    def missing_bytes(self, far: FarCheckpoint) -> int:
        """How much room it still needs; what an earlier attempt brought is there."""
        temporary = self._temporary(far)
        come = (max(part_size(temporary / file), _size(temporary / file)) for file in far.files)
        return max(0, far.bytes - sum(come))

    def fetch(self, far: FarCheckpoint) -> bool:
        """False where the run has removed it meanwhile."""
        folder, temporary = self._run.checkpoints / far.name, self._temporary(far)
        with writing(folder):
            make_parent(self._run.path, temporary)
            temporary.mkdir(exist_ok=True)
            for file, row in far.files.items():
                _adopt(folder / file, temporary / file, row)
        for is_last in (False, True):
            wrong = [file for file, row in far.files.items() if not _is_right(temporary / file, row)]
            if wrong and not self._receive(far, wrong):
                shutil.rmtree(temporary, ignore_errors=True)
                return False
            damaged = [file for file in wrong if not _is_right(temporary / file, far.files[file])]
            for file in damaged:
                (temporary / file).unlink(missing_ok=True)
            if not damaged:
                break
            if is_last:
                shutil.rmtree(temporary, ignore_errors=True)
                raise CheckpointError(
                    f"{far.name}/{damaged[0]} of run '{self._run.run_id}' came twice with another SHA-256 than "
                    f"{MANIFEST} has: it is damaged on the volume.",
                    remedy="Use another checkpoint of the run; those that are whole were fetched.",
                )
        with writing(folder):
            _complete(temporary, folder, far)
        self._tally.files += 1  # the manifest
        self._whole[far.name] = far.manifest
        return True

    def _receive(self, far: FarCheckpoint, files: list[str]) -> bool:
        temporary = self._temporary(far)
        prefix = f"{self._run.checkpoints.name}/{far.name}"
        came = receive(
            self._reader, self._run.path, {f"{prefix}/{file}": temporary / file for file in files}, self._tally
        )
        return all(came.values())

    def tidy(self) -> None:
        """What earlier attempts left: of checkpoints that the run has removed since, and of those replaced here."""
        replaced = [
            path
            for path in self._run.checkpoints.glob(".old-step_*")
            if path.with_name(path.name.removeprefix(".old-")).is_dir()
        ]
        for path in (*self._run.checkpoints.glob(".tmp-step_*-fetch"), *replaced):
            shutil.rmtree(path, ignore_errors=True)

    def _temporary(self, far: FarCheckpoint) -> Path:
        return self._run.checkpoints / f".tmp-{far.name}-fetch"  # a name that training here would clear away


def _adopt(here: Path, target: Path, row: dict[str, Any]) -> None:
    """A file of a damaged local checkpoint that is right need not come again."""
    if not target.exists() and _is_right(here, row):
        target.parent.mkdir(exist_ok=True)
        with suppress(OSError):  # some storage knows no hard links
            os.link(here, target)


def _is_right(path: Path, row: dict[str, Any]) -> bool:
    try:
        if path.is_symlink() or path.stat().st_size != row["bytes"]:
            return False
        return file_sha256(path) == str(row["sha256"])
    except OSError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _complete(temporary: Path, folder: Path, far: FarCheckpoint) -> None:
    """The manifest last, then the name, as a save does it."""
    strangers = {path for path in temporary.rglob("*") if path.is_file()} - {temporary / file for file in far.files}
    for path in strangers:
        path.unlink()
    for file in far.files:
        with (temporary / file).open("rb") as written:
            os.fsync(written.fileno())
    write_synced(temporary / MANIFEST, far.manifest)
    fsync_dir(temporary)
    old = folder.with_name(f".old-{folder.name}")
    if folder.is_symlink():
        folder.unlink()
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    fsync_dir(folder.parent)
