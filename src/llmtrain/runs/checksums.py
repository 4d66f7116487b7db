"""The checksums of a checkpoint: manifest.json, with the SHA-256 of every other file and of its own list of them. It
makes a directory a checkpoint."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from llmtrain.core.files import file_sha256, open_text

CHECKSUMS = "manifest.json"
MAX_BYTES = 64 << 20
"""Maximum size of manifest.json, which is enough for a million files."""
POINTERS = ("latest", "best")
FILE_NAME = re.compile(r"(?:adapter/)?[\w-][\w.-]*")
_NAME = re.compile(r"step_(0|[1-9][0-9]{0,17})")  # step_0099 is not a name that llmtrain writes


def step_of(name: str) -> int | None:
    """20 for step_20; None for other names (incomplete or superseded checkpoints)."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def checksums_text(files: dict[str, Any]) -> str:
    """The content of manifest.json in canonical form, so that any changed byte is detected."""
    content = json.dumps(files, indent=1, sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return json.dumps({"files": files, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def is_whole(text: str, files: dict[str, Any]) -> bool:
    """Whether the text is the manifest.json of these files, and none of them is outside the checkpoint."""
    return text == checksums_text(files) and all(FILE_NAME.fullmatch(name) for name in files)


def is_entry(row: Any) -> bool:
    """Whether the value is a valid entry of manifest.json."""
    return isinstance(row, dict) and isinstance(row.get("bytes"), int) and isinstance(row.get("sha256"), str)


def damage(file: Path, entry: dict[str, Any]) -> str | None:
    """What is wrong with a file of a checkpoint; None if every byte is as written."""
    if file.is_symlink() or not file.is_file():
        return f"{file} is missing."
    try:
        is_same = file.stat().st_size == entry["bytes"] and file_sha256(file) == entry["sha256"]
    except OSError as problem:
        return f"{file} cannot be read: {problem.strerror or problem}."
    return None if is_same else f"{file} is damaged: its SHA-256 does not match {CHECKSUMS}."


def read_checksums(checkpoint: Path) -> dict[str, Any]:
    """The files that a checkpoint's manifest.json lists, with their size and SHA-256. FileNotFoundError: it has none;
    ValueError: it is damaged."""
    path = checkpoint / CHECKSUMS
    if checkpoint.is_symlink() or path.is_symlink():
        raise ValueError(f"{checkpoint} is a symbolic link; a checkpoint must be a plain directory.")
    try:
        with open_text(path) as file:
            text = file.read(MAX_BYTES)
        files = dict(json.loads(text)["files"])
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{path} is damaged: it cannot be read.") from None
    if not is_whole(text, files):
        raise ValueError(f"{path} is damaged: its own SHA-256 does not match.")
    return files


def is_intact(checkpoint: Path) -> bool:
    """Whether manifest.json and every file of a checkpoint are as written; reads all of them."""
    try:
        files = read_checksums(checkpoint)
    except (OSError, ValueError):
        return False
    return all(is_entry(entry) and damage(checkpoint / name, entry) is None for name, entry in files.items())
