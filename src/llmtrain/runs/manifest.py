"""The manifest of a checkpoint, with the SHA-256 of every file and of itself. It makes a directory a checkpoint."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from llmtrain.files import file_sha256

MANIFEST = "manifest.json"
POINTERS = ("latest", "best")
FILE_NAME = re.compile(r"(?:adapter/)?[\w-][\w.-]*")
_NAME = re.compile(r"step_(0|[1-9][0-9]{0,17})")  # step_0099 is not a name that llmtrain writes


def step_of(name: str) -> int | None:
    """20 for step_20; None for other names (incomplete or superseded checkpoints)."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def manifest_text(files: dict[str, Any]) -> str:
    """The manifest in canonical form, so that any changed byte is detected."""
    content = json.dumps(files, indent=1, sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return json.dumps({"files": files, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def is_whole(text: str, files: dict[str, Any]) -> bool:
    """Whether the text is the manifest of these files, and none of them is outside the checkpoint."""
    return text == manifest_text(files) and all(FILE_NAME.fullmatch(name) for name in files)


def is_entry(row: Any) -> bool:
    """Whether the value is a valid entry of a manifest."""
    return isinstance(row, dict) and isinstance(row.get("bytes"), int) and isinstance(row.get("sha256"), str)


def damage(file: Path, entry: dict[str, Any]) -> str | None:
    """What is wrong with a file of a checkpoint; None if every byte is as written."""
    if file.is_symlink() or not file.is_file():
        return f"{file} is missing."
    try:
        is_same = file.stat().st_size == entry["bytes"] and file_sha256(file) == entry["sha256"]
    except OSError as problem:
        return f"{file} cannot be read: {problem.strerror or problem}."
    return None if is_same else f"{file} is damaged: its SHA-256 does not match {MANIFEST}."


def is_intact(checkpoint: Path) -> bool:
    """Whether the manifest and every file of a checkpoint are as written; reads all of them."""
    try:
        text = (checkpoint / MANIFEST).read_text(encoding="utf-8")
        files = json.loads(text)["files"]
        return is_whole(text, files) and all(
            is_entry(entry) and damage(checkpoint / name, entry) is None for name, entry in files.items()
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False
