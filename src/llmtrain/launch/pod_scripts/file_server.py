"""The script of the reader pod: lists and sends the files of one directory for `fetch`. The image need not contain
llmtrain, so it uses the standard library only, runs on Python 3.9 and later, and imports nothing from this package.

    list DIRECTORY                           one JSON line per file: path, size, mtime_ns, version
    send DIRECTORY OFFSET VERSION PATH ...   per file one JSON line (path, offset, size, mtime_ns, version), then
                                             exactly `size` bytes; or only the line {"path": ..., "gone": true}
    wait SECONDS                             exit once no other process has run for this long

The version changes when a file changes or is replaced. A file is sent from OFFSET if it still has VERSION (or VERSION
is `any`), else from the beginning; the JSON line says which. Files outside the directory are not sent, and symbolic
links are not followed.
"""

import json
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

BLOCK = 2**20
ANY = "any"


def list_files(directory: str, out: BinaryIO) -> None:
    for parent, subdirectories, names in os.walk(directory):  # skips directories that are deleted meanwhile
        subdirectories.sort()
        for name in sorted(names):
            path = Path(parent, name)
            try:
                status = path.lstat()
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                row = {"path": str(path.relative_to(directory)), "size": status.st_size}
                out.write(line({**row, **describe(status)}))
    out.flush()


def send_files(directory: str, words: "list[str]", out: BinaryIO) -> None:
    for offset, version, path in zip(words[::3], words[1::3], words[2::3]):  # noqa: B905 (strict needs Python 3.10)
        try:
            file = open_inside(Path(directory).resolve(), path)
        except OSError:
            out.write(line({"path": path, "gone": True}))
            continue
        with file:
            send(file, path, int(offset), version, out)
    out.flush()


def open_inside(directory: Path, path: str) -> BinaryIO:
    """Open a regular file. Refused if any part of the path is a symbolic link or leads out of the directory."""
    full = directory / path
    if full.resolve() != full or directory not in full.parents:
        raise OSError(path)
    file = open(os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", 0)  # noqa: PTH123, SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(path)
    return file


def send(file: BinaryIO, path: str, offset: int, version: str, out: BinaryIO) -> None:
    status = os.fstat(file.fileno())
    current = describe(status)
    offset = min(offset, status.st_size) if version in (current["version"], ANY) else 0
    remaining = status.st_size - offset
    out.write(line({"path": path, "offset": offset, "size": remaining, **current}))
    file.seek(offset)
    while remaining:
        block = file.read(min(remaining, BLOCK))
        if not block:
            sys.exit(f"{path} was truncated while it was being read")
        out.write(block)
        remaining -= len(block)


def describe(status: os.stat_result) -> "dict[str, Any]":
    version = f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"
    return {"mtime_ns": status.st_mtime_ns, "version": version}


def line(row: "dict[str, Any]") -> bytes:
    return json.dumps(row).encode("ascii") + b"\n"


def wait_idle(seconds: float) -> None:
    """Return once no other process has run for `seconds`: the client may have been killed before it deleted the pod."""
    last_active = time.monotonic()
    while time.monotonic() < last_active + seconds:
        time.sleep(min(5.0, seconds))
        processes = [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]
        last_active = time.monotonic() if len(processes) > 1 else last_active


def main(words: "list[str]") -> None:
    if words[0] == "wait":
        wait_idle(float(words[1]))
    elif words[0] == "list":
        list_files(words[1], sys.stdout.buffer)
    else:
        send_files(words[1], words[2:], sys.stdout.buffer)


if __name__ == "__main__":
    main(sys.argv[1:])
