"""A directory of tokenised data: made once for a source and a tokenizer, then only opened.

    <cache_dir>/tokens/<key>/   files of each split (train.bin, val.bin, ...)  tokenizer/  meta.json

The key is a hash of what decides the tokens. The directory is made under another name and renamed when complete,
so it is there whole or not at all; a file lock lets one process make it while others wait.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from llmtrain.data.tokenizer import Tokenizer, is_saved_tokenizer, load_saved_tokenizer
from llmtrain.errors import DataError, UsageError
from llmtrain.logs import warn
from llmtrain.runs.atomic import fsync_dir, is_there, read_json, write_json

Split = Literal["train", "val"]
SPLITS: tuple[Split, Split] = ("train", "val")
FORMAT_VERSION = 2
WAIT_FOR_OTHER_SEC = 24 * 3600


@dataclass(frozen=True)
class Written:
    """What was written for one split."""

    count: int
    """Tokens."""
    sha256: str
    """Of what is trained on, not of where it came from."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What is needed to open the files again."""


Write = Callable[[Path, Split, Tokenizer], Written]
"""Writes the files of one split into a folder."""


@dataclass(frozen=True)
class StoreFolder:
    path: Path
    meta: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return str(self.meta["fingerprint"])

    def tokenizer(self) -> Tokenizer:
        return load_saved_tokenizer(self.path / "tokenizer")

    def facts(self, split: Split) -> dict[str, Any]:
        return dict(self.meta["facts"][split])

    def is_whole(self) -> bool:
        """Every file there and as long as it was when written."""
        try:
            sizes = self.meta["sizes"].items()
            return (
                bool(sizes)
                and all((self.path / name).stat().st_size == size for name, size in sizes)
                and is_saved_tokenizer(self.path / "tokenizer")
            )
        except (OSError, KeyError, TypeError, AttributeError):
            return False


def open_or_build(
    cache_dir: Path, identity: dict[str, Any], tokenizer: Callable[[], Tokenizer], write: Write
) -> StoreFolder:
    identity = {"format": FORMAT_VERSION, **identity}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:20]
    path = cache_dir / "tokens" / key
    found = _open_folder(path)
    if found:
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f"{key}.lock"), timeout=WAIT_FOR_OTHER_SEC):
            found = _open_folder(path)  # another process may have made it while this one waited
            return found or _build(path, identity, tokenizer(), write)
    except (PermissionError, NotADirectoryError, FileExistsError) as problem:
        raise UsageError(
            f"The cache {cache_dir} cannot be used: {problem.strerror or problem}.",
            remedy="Set data.cache_dir to a directory you may write to.",
        ) from None
    except Timeout:
        raise UsageError(f"Another process has been tokenising into {path} for a day.") from None
    except OSError as problem:
        raise DataError(f"The tokens could not be written to {cache_dir}: {problem.strerror or problem}.") from None


def _open_folder(path: Path) -> StoreFolder | None:
    meta = read_json(path / "meta.json")
    if meta is None and not is_there(path):
        return None
    folder = StoreFolder(path, meta if isinstance(meta, dict) else {})
    if folder.is_whole():
        return folder
    warn("DATA", f"the token store {path} is damaged; it is made anew")
    return None


def _build(path: Path, identity: dict[str, Any], tokenizer: Tokenizer, write: Write) -> StoreFolder:
    temporary = path.with_name(f"{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        written = {split: write(temporary, split, tokenizer) for split in SPLITS}
        tokenizer.save(temporary / "tokenizer")
        files = sorted(file for file in temporary.rglob("*") if file.is_file())
        meta = {
            "identity": identity,
            "tokens": {split: part.count for split, part in written.items()},
            "facts": {split: part.facts for split, part in written.items()},
            "sizes": {file.relative_to(temporary).as_posix(): file.stat().st_size for file in files},
            "fingerprint": hashlib.sha256("".join(part.sha256 for part in written.values()).encode()).hexdigest(),
        }
        write_json(temporary / "meta.json", meta)
        if path.exists():  # damaged, or it would have been opened
            shutil.rmtree(path)
        temporary.rename(path)
        fsync_dir(path.parent)
        return StoreFolder(path, meta)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
