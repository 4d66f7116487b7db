"""SHA-256 over large files that rarely change: read once, then remembered by size and time."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from llmtrain.runs.atomic import read_json, write_json


def files_sha256(files: Sequence[Path], cache_dir: Path) -> str:
    """One hash over the names and contents of files. Kept in the cache under what tells that a file is unchanged."""
    stamps = [[str(path.resolve()), (stat := path.stat()).st_size, stat.st_mtime_ns] for path in files]
    key = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:20]
    note = cache_dir / "hashes" / f"{key}.json"
    known = read_json(note)
    if isinstance(known, dict) and known.get("files") == stamps:
        return str(known["sha256"])
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, {"files": stamps, "sha256": digest.hexdigest()})
    except OSError:
        pass  # a cache that cannot be written only costs time
    return digest.hexdigest()
