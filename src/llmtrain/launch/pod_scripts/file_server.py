"""The far side of `fetch`: lists and sends files of one folder. Its source runs in the reader pod, whose image need not
have llmtrain: the standard library alone, Python 3.9 and later, and no import from this package.

    list FOLDER                            a line of JSON for each file: path, size, mtime_ns, version
    send FOLDER OFFSET VERSION PATH ...    for each file a line of JSON (path, offset, size, mtime_ns, version), then
                                           exactly `size` bytes; or just a line {"path": ..., "gone": true}
    wait SECONDS                           until nothing else has run here for so long: then nobody needs the pod

A version tells a file from one that has taken its name since. A file is sent from OFFSET on where it still has that
VERSION (or `any` is asked for), else from its beginning; the header says which. Nothing outside the folder is sent, and
no symbolic link is followed.
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


def list_files(folder: str, out: BinaryIO) -> None:
    for place, folders, names in os.walk(folder):  # a folder that vanishes meanwhile is empty
        folders.sort()
        for name in sorted(names):
            path = Path(place, name)
            try:
                found = path.lstat()
            except OSError:
                continue
            if stat.S_ISREG(found.st_mode):
                row = {"path": str(path.relative_to(folder)), "size": found.st_size}
                out.write(line({**row, **describe(found)}))
    out.flush()


def send_files(folder: str, words: "list[str]", out: BinaryIO) -> None:
    for offset, version, path in zip(words[::3], words[1::3], words[2::3]):  # noqa: B905 (strict is 3.10's)
        try:
            file = open_inside(Path(folder).resolve(), path)
        except OSError:
            out.write(line({"path": path, "gone": True}))
            continue
        with file:
            send(file, path, int(offset), version, out)
    out.flush()


def open_inside(folder: Path, path: str) -> BinaryIO:
    """Refused where any part of the path is a symbolic link or leads out."""
    full = folder / path
    if full.resolve() != full or folder not in full.parents:
        raise OSError(path)
    file = open(os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", 0)  # noqa: PTH123, SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(path)
    return file


def send(file: BinaryIO, path: str, offset: int, version: str, out: BinaryIO) -> None:
    found = os.fstat(file.fileno())
    now = describe(found)
    offset = min(offset, found.st_size) if version in (now["version"], ANY) else 0
    left = found.st_size - offset
    out.write(line({"path": path, "offset": offset, "size": left, **now}))
    file.seek(offset)
    while left:
        block = file.read(min(left, BLOCK))
        if not block:
            sys.exit(f"{path} became shorter while it was read")
        out.write(block)
        left -= len(block)


def describe(found: os.stat_result) -> "dict[str, Any]":
    version = f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"
    return {"mtime_ns": found.st_mtime_ns, "version": version}


def line(row: "dict[str, Any]") -> bytes:
    return json.dumps(row).encode("ascii") + b"\n"


def wait_idle(seconds: float) -> None:
    """Whoever made the pod may have been killed before it could remove it."""
    last = time.monotonic()
    while time.monotonic() < last + seconds:
        time.sleep(min(5.0, seconds))
        others = [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]
        last = time.monotonic() if len(others) > 1 else last


def main(words: "list[str]") -> None:
    if words[0] == "wait":
        wait_idle(float(words[1]))
    elif words[0] == "list":
        list_files(words[1], sys.stdout.buffer)
    else:
        send_files(words[1], words[2:], sys.stdout.buffer)


if __name__ == "__main__":
    main(sys.argv[1:])
