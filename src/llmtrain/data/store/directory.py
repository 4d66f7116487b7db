"""A directory of tokenised data: made once for a source and a tokenizer, then only opened.

    <cache_dir>/tokens/<key>/   files of each split (train.bin, val.bin, ...)  tokenizer/  meta.json  verified.json

The key is a hash of what decides the tokens. The directory is made under another name and renamed when complete,
so it is there whole or not at all; a file lock lets one process make it while others wait. meta.json has the SHA-256
of every file. They are verified once; verified.json remembers by size, times and inode that the files are unchanged.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from llmtrain.content_hash import file_sha256, stamp
from llmtrain.data.tokenizers.base import Tokenizer
from llmtrain.data.tokenizers.load import load_saved_tokenizer
from llmtrain.data.types import SPLITS, Split
from llmtrain.errors import DataError, UsageError
from llmtrain.files import fsync_dir, is_full, is_there, read_json, write_json
from llmtrain.logs import log, warn

FORMAT_VERSION = 2
WAIT_FOR_OTHER_SEC = 24 * 3600
META, VERIFIED = "meta.json", "verified.json"


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
class StoreDirectory:
    path: Path
    meta: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return str(self.meta["fingerprint"])

    def tokenizer(self) -> Tokenizer:
        return load_saved_tokenizer(self.path / "tokenizer")

    def facts(self, split: Split) -> dict[str, Any]:
        return dict(self.meta["facts"][split])

    def stamps(self) -> dict[str, list[int]] | None:
        """The stamp of every file; None where one is missing or not as long as it was when written."""
        try:
            found = {name: stamp(self.path / name) for name in self.meta["sha256"]}
            is_whole = bool(found) and all(found[name][0] == size for name, size in self.meta["sizes"].items())
        except (OSError, KeyError, TypeError, AttributeError):
            return None
        return found if is_whole and self.meta.get("meta_sha256") == _meta_sha256(self.meta) else None


def open_or_build(
    cache_dir: Path, identity: dict[str, Any], tokenizer: Callable[[], Tokenizer], write: Write
) -> StoreDirectory:
    identity = {"format": FORMAT_VERSION, **identity}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:20]
    path = cache_dir / "tokens" / key
    found = _open_verified(path)
    if found is None and not os.access(path.parent, os.W_OK):
        found = _verify(path)  # on a read-only volume nobody can remember it for the next start
    if found:
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f"{key}.lock"), timeout=WAIT_FOR_OTHER_SEC):
            found = _open_verified(path)  # another process may have made or verified it while this one waited
            return found or _verify(path) or _build(path, identity, tokenizer(), write)
    except (PermissionError, NotADirectoryError, FileExistsError) as problem:
        raise UsageError(
            f"The cache {cache_dir} cannot be used: {problem.strerror or problem}.",
            remedy="Set data.cache_dir to a directory you may write to.",
        ) from None
    except Timeout:
        raise UsageError(f"Another process has been tokenising into {path} for a day.") from None
    except OSError as problem:
        raise DataError(
            f"The tokens could not be written to {cache_dir}: {problem.strerror or problem}.",
            remedy="Free some space, or set data.cache_dir to another disk." if is_full(problem) else None,
        ) from None


def _open(path: Path) -> StoreDirectory:
    meta = read_json(path / META)
    return StoreDirectory(path, meta if isinstance(meta, dict) else {})


def _open_verified(path: Path) -> StoreDirectory | None:
    """The store, where its files are those that were verified before."""
    folder = _open(path)
    stamps = folder.stamps()
    return folder if stamps is not None and stamps == read_json(path / VERIFIED) else None


def _verify(path: Path) -> StoreDirectory | None:
    """The store, after every byte of it was read; None where there is none, or a damaged one."""
    if not is_there(path):
        return None
    folder = _open(path)
    stamps = folder.stamps()  # before the files are read: a change in the meantime shows at the next start
    if "sha256" not in folder.meta and "sizes" in folder.meta:
        log("DATA", f"the token store {path} was made by an earlier version, without checksums; it is rebuilt")
        return None
    damaged = next(_damaged(folder), None) if stamps is not None else "a file is missing or has another size"
    if damaged:
        warn("DATA", f"the token store {path} is damaged ({damaged}); it is rebuilt")
        return None
    with contextlib.suppress(OSError):  # then the next start verifies it again
        write_json(path / VERIFIED, stamps)
    return folder


def _damaged(folder: StoreDirectory) -> Iterator[str]:
    total = sum(folder.meta["sizes"].values())
    log("DATA", f"verifying the SHA-256 of the token store {folder.path} ({total / 1e6:.1f} MB)")
    for name, sha256 in folder.meta["sha256"].items():
        try:
            if file_sha256(folder.path / name) != sha256:
                yield f"the SHA-256 of {name} is not the recorded one"
        except OSError as problem:
            yield f"{name} cannot be read: {problem.strerror or problem}"


def _meta_sha256(meta: dict[str, Any]) -> str:
    rest = {name: value for name, value in meta.items() if name != "meta_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _build(path: Path, identity: dict[str, Any], tokenizer: Tokenizer, write: Write) -> StoreDirectory:
    temporary = path.with_name(f"{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        written = {split: write(temporary, split, tokenizer) for split in SPLITS}
        tokenizer.save(temporary / "tokenizer")
        files = {
            file.relative_to(temporary).as_posix(): file for file in sorted(temporary.rglob("*")) if file.is_file()
        }
        facts = {
            "identity": identity,
            "tokens": {split: part.count for split, part in written.items()},
            "facts": {split: part.facts for split, part in written.items()},
            "sizes": {name: file.stat().st_size for name, file in files.items()},
            "sha256": {name: file_sha256(file) for name, file in files.items()},
            "fingerprint": hashlib.sha256("".join(part.sha256 for part in written.values()).encode()).hexdigest(),
        }
        meta = json.loads(json.dumps(facts))  # as it will be read
        meta["meta_sha256"] = _meta_sha256(meta)
        write_json(temporary / META, meta)
        write_json(temporary / VERIFIED, StoreDirectory(temporary, meta).stamps())
        if path.exists():  # damaged, or it would have been opened
            shutil.rmtree(path)
        temporary.rename(path)
        fsync_dir(path.parent)
        return StoreDirectory(path, meta)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
