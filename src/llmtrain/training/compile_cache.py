"""Compiled code that outlives the machine: a start that finds it compiles nothing.

    <data.cache_dir>/compiled/<key>.tar     what the compilers of torch and Triton have written to their directories
    <temporary directory>/llmtrain-compiled-<uid>/<key>/      those directories, used by all processes of a machine,
                                                              which share a lock of <key>.used while they run

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
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from llmtrain.core.env import scoped_environment
from llmtrain.core.files import open_bytes, write_bytes_atomic
from llmtrain.core.logs import warn
from llmtrain.core.text import format_bytes
from llmtrain.runs.metadata import cpu_architecture, cpu_flags, cpu_name

INDUCTOR_DIRECTORY = "TORCHINDUCTOR_CACHE_DIR"
TRITON_DIRECTORY = "TRITON_CACHE_DIR"
MOST_FILES = 16
"""Kept in data.cache_dir, and directories on a machine; the oldest is deleted first."""
MOST_BYTES = 2 * 2**30
_MOST_HEADER_BYTES = 4096
_SECONDS_TO_WRITE = 86_400  # at most, whatever the clocks of the machines say
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
        if self.local.exists():
            with suppress(OSError, ValueError), _open_file(self.path) as file:
                self.compile_seconds = _seconds_in(_read_header(file))
        else:
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
        self.compile_seconds = _seconds_in(header)
        partial = self.local.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        try:
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                _extract(archive, partial)
        except (OSError, tarfile.TarError, zlib.error, EOFError, KeyError) as problem:  # no space, a link to nothing
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
    if _user_has_chosen(INDUCTOR_DIRECTORY) or _user_has_chosen(TRITON_DIRECTORY):
        yield None
        return
    with ExitStack() as stack:
        try:
            cache = stack.enter_context(_opened_cache(directory / f"{key}.tar", key))
        except OSError as problem:  # a full or read-only temporary directory: compilers report it, if they cannot work
            warn("TRAIN", f"compiled code is not kept for the next start: {problem}")
            yield None
            return
        # As a new process finds them: Triton reads its variable where our own kernels are compiled, inductor both.
        variables = {INDUCTOR_DIRECTORY: str(cache.local / "inductor"), TRITON_DIRECTORY: str(cache.local / "triton")}
        stack.enter_context(scoped_environment(variables))
        yield cache


@contextmanager
def _opened_cache(path: Path, key: str) -> Iterator[CompileCache]:
    """Inside the block, no other process deletes the local directory."""
    directory = _private_directory()
    cache = CompileCache(path, directory / key)
    with (directory / f"{key}.used").open("a+") as used:
        fcntl.flock(used, fcntl.LOCK_SH)
        with suppress(OSError):
            _delete_unused(directory)
        with (directory / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of a machine start at once
            cache.unpack()
        os.utime(cache.local)
        yield cache


def _user_has_chosen(variable: str) -> bool:
    """Whether a directory of the compilers was set before this process compiled anything: when torch does, it sets
    those that are missing to its defaults."""
    chosen = os.environ.get(variable)
    defaults = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    if chosen is None or defaults is None:
        return chosen is not None
    return not Path(chosen).is_relative_to(defaults.default_cache_dir())


def _delete_unused(directory: Path) -> None:
    """Delete the least recently used directories of compiled code that no process uses, and what killed processes have
    left of others."""
    leftovers = [*directory.glob("*.deleted"), *directory.glob("*.partial")]  # the first are in the way of renames
    whole = [path for path in directory.iterdir() if path.is_dir() and not path.suffix]
    whole.sort(key=lambda path: path.stat().st_mtime)
    for path in [*leftovers, *whole[:-MOST_FILES]]:
        # "a+": on NFS a shared lock needs a file that is open for reading, an exclusive one a file open for writing.
        with path.with_suffix(".used").open("a+") as used, suppress(BlockingIOError):
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Half of a directory must not be taken for a whole one if this process is killed now.
            deleted = path.with_suffix(".deleted")
            path.rename(deleted)
            shutil.rmtree(deleted, ignore_errors=True)


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
        # Virtual machines with one name for their CPU may have other instructions, and code is made for all there are.
        return {**facts, "cpu": cpu_name(), "instructions": cpu_flags() or torch.backends.cpu.get_cpu_capability()}
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
    found = []
    for path in directory.rglob("*"):
        is_being_written = any(part.startswith("tmp.") for part in path.relative_to(directory).parts)
        if path.is_file() and not path.is_symlink() and not path.name.endswith(is_left_out) and not is_being_written:
            found.append(path)
    return sorted(found)


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
    with _open_file(path) as file:
        header = _read_header(file)
        content = file.read()
    if hashlib.sha256(content).hexdigest() != header["sha256"]:
        raise ValueError(f"its checksum is wrong, {format_bytes(len(content))} are damaged")
    return header, content


def _open_file(path: Path) -> BinaryIO:
    file = open_bytes(path)
    status = os.fstat(file.fileno())
    problem = None
    if status.st_uid not in (os.getuid(), 0):  # root: volumes that know no owners
        problem = "it belongs to another user"
    elif status.st_size > MOST_BYTES:
        problem = f"it has {format_bytes(status.st_size)}, at most {format_bytes(MOST_BYTES)} are read"
    if problem is None:
        return file
    file.close()
    raise ValueError(problem)


def _read_header(file: BinaryIO) -> Mapping[str, Any]:
    try:
        header = json.loads(file.readline(_MOST_HEADER_BYTES))
    except ValueError:
        header = None
    if not isinstance(header, dict) or "sha256" not in header:
        raise ValueError("it is damaged")
    return header


def _seconds_in(header: Mapping[str, Any]) -> float | None:
    seconds = header.get("compile_seconds")
    return float(seconds) if isinstance(seconds, int | float) else None


def _delete_oldest(directory: Path) -> None:
    by_age = []
    for path in directory.glob("*.tar"):
        with suppress(FileNotFoundError):  # another run deletes as well
            by_age.append((path.stat().st_mtime, path))
    for _, path in sorted(by_age)[:-MOST_FILES]:
        path.unlink(missing_ok=True)
    for path in directory.glob(".*.tar.*.tmp"):  # from starts that were killed while they wrote the file
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - _SECONDS_TO_WRITE:
                path.unlink()
