"""What makes a directory a checkpoint: its name, and a manifest with the SHA-256 of every file in it and of itself."""

import hashlib
import json
import re
from typing import Any

MANIFEST = "manifest.json"
POINTERS = ("latest", "best")
FILE_NAME = re.compile(r"(?:adapter/)?[\w-][\w.-]*")
_NAME = re.compile(r"step_(0|[1-9][0-9]{0,17})")  # as it is written: step_0099 is somebody's own


def step_of(name: str) -> int | None:
    """20 of step_20; None for what is no checkpoint (half-written, set aside)."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def manifest_text(files: dict[str, Any]) -> str:
    """In one canonical form, so that any changed byte shows, in the hash or in the form."""
    listed = json.dumps(files, indent=1, sort_keys=True)
    digest = hashlib.sha256(listed.encode()).hexdigest()
    return json.dumps({"files": files, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def is_whole(text: str, files: dict[str, Any]) -> bool:
    """Whether a manifest's text is what was written for these files, and names nothing outside the checkpoint."""
    return text == manifest_text(files) and all(FILE_NAME.fullmatch(name) for name in files)


def is_entry(row: Any) -> bool:
    """Whether it is what a manifest says of a file."""
    return isinstance(row, dict) and isinstance(row.get("bytes"), int) and isinstance(row.get("sha256"), str)
