"""Compiled code that outlives the machine: a start that finds it compiles nothing.

    <data.cache_dir>/compiled/<key>.tar     what the compilers of torch and Triton have written to their directories
    <temporary directory>/llmtrain-compiled-<uid>/<key>/      those directories, used by all processes of a machine

The key is a hash of everything the code depends on: versions, device, driver, model and batch. The file is code, so it
lies where the checkpoints of its runs and their data lie, on the volume of data.cache_dir, and only a file with the
right checksum is unpacked. Anything else is ignored: the run compiles, and writes the file again.
"""

import fcntl
import hashlib
import io
import json
import os
import platform
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmtrain.core.env import scoped_environment
from llmtrain.core.files import write_bytes_atomic
from llmtrain.core.logs import warn
from llmtrain.core.text import format_bytes
from llmtrain.runs.metadata import cpu_architecture, cpu_name

INDUCTOR_DIRECTORY = "TORCHINDUCTOR_CACHE_DIR"
TRITON_DIRECTORY = "TRITON_CACHE_DIR"
MOST_FILES = 16
"""Kept in data.cache_dir; the oldest is deleted first."""
_FORMAT = 1


@dataclass
class CompileCache:
    path: Path
    """The file that outlives this machine."""
    local: Path
    """The directory that the compilers use."""
    compile_seconds: float | None = None
    """What compiling took when the file was written."""
    is_filled: bool = False
    """Whether the local directory held compiled code before this start."""
    _saved_files: int = 0

    def save(self, compile_seconds: float | None = None) -> None:
        """Write the file if there is code that it does not hold yet. A run does not fail because of it."""
        files = _files(self.local)
        if len(files) <= self._saved_files:
            return
        self._saved_files = len(files)
        if self.compile_seconds is None:
            self.compile_seconds = compile_seconds
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes_atomic(self.path, _packed(self.local, files, self.compile_seconds))
            _delete_oldest(self.path.parent)
        except OSError as problem:
            warn("TRAIN", f"compiled code was not saved to {self.path}, so the next start compiles again: {problem}")

    def unpack(self) -> None:
        """Fill the local directory from the file, unless it exists. Called by one process of the machine at a time."""
        if not self.local.exists():
            self._unpack_file()
        self._saved_files = len(_files(self.local))
        self.is_filled = self._saved_files > 0

    def _unpack_file(self) -> None:
        try:
            header, content = _opened(self.path)
        except FileNotFoundError:
            self.local.mkdir(mode=0o700)
            return
        except (OSError, ValueError) as problem:
            warn("TRAIN", f"ignoring the compiled code in {self.path}: {problem}")
            self.local.mkdir(mode=0o700)
            return
        self.compile_seconds = header.get("compile_seconds")
        partial = self.local.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        try:
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                _extract(archive, partial)
        except (OSError, tarfile.TarError) as problem:  # no space, say
            warn("TRAIN", f"the compiled code in {self.path} cannot be unpacked: {problem}")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o700)
        partial.rename(self.local)


def _extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Not extractall: Python has its filters, which keep files inside the folder, only since 3.11.4."""
    for member in archive:
        target = folder / member.name
        file = archive.extractfile(member)
        if file is None or not target.resolve().is_relative_to(folder.resolve()):
            raise tarfile.TarError(f"{member.name} is not a file inside of the directory")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read())
        target.chmod(0o700)
        os.utime(target, (member.mtime, member.mtime))


@contextmanager
def compile_cache(directory: Path, key: str) -> Iterator[CompileCache | None]:
    """Let the compilers use the code of a key inside the block, which is kept in `directory`. None if the user has
    chosen the compilers' directories."""
    if INDUCTOR_DIRECTORY in os.environ or TRITON_DIRECTORY in os.environ:
        yield None
        return
    try:
        cache = _open(directory / f"{key}.tar", key)
    except OSError as problem:  # a full or read-only temporary directory: the compilers report it, if they cannot work
        warn("TRAIN", f"compiled code is not kept for the next start: {problem}")
        yield None
        return
    # As a new process finds them: Triton reads its variable where our own kernels are compiled, inductor both.
    variables = {INDUCTOR_DIRECTORY: str(cache.local / "inductor"), TRITON_DIRECTORY: str(cache.local / "triton")}
    with scoped_environment(variables):
        yield cache


def _open(path: Path, key: str) -> CompileCache:
    directory = _private_directory()
    cache = CompileCache(path, directory / key)
    with (directory / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of a machine start at once
        cache.unpack()
    return cache


def _private_directory() -> Path:
    """Below the temporary directory, where others could put code of theirs for us to run: it must be ours alone."""
    directory = Path(tempfile.gettempdir()) / f"llmtrain-compiled-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{directory} must be a directory of this user that no one else can write to or read")
    return directory


def cache_key(inputs: Mapping[str, Any], device: torch.device) -> str:
    """A hash of what compiled code depends on: fields of the config, versions and device. Too fine a key compiles once
    more; too coarse a one is safe as well, because the compilers look each piece of code up by its own hash."""
    facts = {"format": _FORMAT, "environment": environment(device), **inputs}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and device that compiled code is made for."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "architecture": cpu_architecture(),
    }
    if device.type != "cuda":
        return {**facts, "cpu": cpu_name(), "instructions": torch.backends.cpu.get_cpu_capability()}
    return {
        **facts,
        "gpu": torch.cuda.get_device_name(device),
        "capability": torch.cuda.get_device_capability(device),
        "cuda": torch.version.cuda,
        "driver": getattr(torch._C, "_cuda_getDriverVersion", int)(),
    }


def _files(directory: Path) -> list[Path]:
    """Those of the compilers, without their locks and what they are writing at the moment."""
    is_left_out = (".lock", ".tmp")
    found = (path for path in directory.rglob("*") if path.is_file() and not path.name.endswith(is_left_out))
    return sorted(path for path in found if not any(part.startswith("tmp.") for part in path.parts))


def _packed(directory: Path, files: list[Path], compile_seconds: float | None) -> bytes:
    """One line of JSON with the checksum of the archive that follows it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for path in files:
            try:
                archive.add(path, path.relative_to(directory), recursive=False)
            except FileNotFoundError:  # a compiler has renamed it
                continue
    content = buffer.getvalue()
    header = {"sha256": hashlib.sha256(content).hexdigest(), "compile_seconds": compile_seconds}
    return json.dumps(header).encode() + b"\n" + content


def _opened(path: Path) -> tuple[Mapping[str, Any], bytes]:
    """Header and archive of a file; ValueError if it is damaged or someone else's."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_uid not in (os.getuid(), 0):  # root: volumes that know no owners
            raise ValueError("it belongs to another user")
        line, _, content = file.read().partition(b"\n")
    try:
        header = json.loads(line)
        expected = header["sha256"]
    except (ValueError, TypeError, KeyError):
        raise ValueError("it is damaged") from None
    if hashlib.sha256(content).hexdigest() != expected:
        raise ValueError(f"its checksum is wrong, {format_bytes(len(content))} are damaged")
    return header, content


def _delete_oldest(directory: Path) -> None:
    files = sorted(directory.glob("*.tar"), key=lambda path: path.stat().st_mtime)
    for path in files[:-MOST_FILES]:
        path.unlink(missing_ok=True)
