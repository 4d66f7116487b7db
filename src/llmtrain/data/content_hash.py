"""Cached SHA-256 of large files that rarely change."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from llmtrain.core.files import file_sha256, read_json, write_json


def stamp(path: Path) -> list[int]:
    """Values that change with the file. Size and mtime are not enough: tools that copy files set the mtime, and models
    of one architecture have the same size. Only the kernel sets the ctime."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def files_sha256(files: Sequence[Path], cache_dir: Path) -> str:
    """One hash of the names and contents of files, cached by their stamps."""
    stamps = [[str(path.resolve()), *stamp(path)] for path in files]
    key = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:20]
    entry = cache_dir / "hashes" / f"{key}.json"
    cached = read_json(entry)
    if isinstance(cached, dict) and cached.get("files") == stamps:
        return str(cached["sha256"])
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        write_json(entry, {"files": stamps, "sha256": digest.hexdigest()})
    except OSError:
        pass  # without a cache entry the next call hashes again
    return digest.hexdigest()
