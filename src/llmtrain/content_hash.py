"""SHA-256 over large files that rarely change: read once, then remembered by their stamps."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from llmtrain.files import file_sha256, read_json, write_json


def stamp(path: Path) -> list[int]:
    """What tells that a file is unchanged. Size and time of change alone do not: tools that copy files set the time,
    and two models of one architecture have one size. Nothing but the kernel sets ctime."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def files_sha256(files: Sequence[Path], cache_dir: Path) -> str:
    """One hash over the names and contents of files. Kept in the cache under what tells that a file is unchanged."""
    stamps = [[str(path.resolve()), *stamp(path)] for path in files]
    key = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:20]
    note = cache_dir / "hashes" / f"{key}.json"
    known = read_json(note)
    if isinstance(known, dict) and known.get("files") == stamps:
        return str(known["sha256"])
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, {"files": stamps, "sha256": digest.hexdigest()})
    except OSError:
        pass  # a cache that cannot be written only costs time
    return digest.hexdigest()
