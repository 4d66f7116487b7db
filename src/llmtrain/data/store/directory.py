"""A directory of tokenized data: built once per source and tokenizer, then only opened.

    <cache_dir>/tokens/<key>/   files of each split (train.bin, val.bin, ...)  tokenizer/  meta.json  verified.json

The key is a hash of what determines the tokens. The directory is built under a temporary name and renamed when
complete, so it is never partial; a file lock makes one process build it while others wait. meta.json has the SHA-256
of every file. They are verified once; verified.json records size, times and inode of the verified files.
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

from llmtrain.compat.run_files import lacks_checksums
from llmtrain.core.files import file_sha256, fsync_dir, is_full, is_there, read_json, write_json
from llmtrain.core.logs import log, warn
from llmtrain.data.content_hash import stamp
from llmtrain.data.text_and_examples import SPLITS, Split
from llmtrain.data.tokenizers.base import Tokenizer
from llmtrain.data.tokenizers.load import load_saved_tokenizer
from llmtrain.errors import DataError, UsageError

FORMAT_VERSION = 2
LOCK_TIMEOUT_SEC = 24 * 3600
META = "meta.json"
VERIFIED = "verified.json"


@dataclass(frozen=True)
class Written:
    """The result of writing one split."""

    count: int
    """Number of tokens."""
    sha256: str
    """Hash of the data, without its origin."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What is needed to open the files."""


Write = Callable[[Path, Split, Tokenizer], Written]
"""Writes the files of one split into a directory."""


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
        """The stamp of every file; None if a file is missing or has another size than recorded."""
        try:
            stamps = {name: stamp(self.path / name) for name in self.meta["sha256"]}
            is_complete = bool(stamps) and all(stamps[name][0] == size for name, size in self.meta["sizes"].items())
        except (OSError, KeyError, TypeError, AttributeError):
            return None
        if not is_complete or self.meta.get("meta_sha256") != _meta_sha256(self.meta):
            return None
        return stamps


def open_or_build(
    cache_dir: Path, identity: dict[str, Any], tokenizer: Callable[[], Tokenizer], write: Write
) -> StoreDirectory:
    """The store of this identity, opened if it is intact, else built with `write`."""
    identity = {"format": FORMAT_VERSION, **identity}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:20]
    path = cache_dir / "tokens" / key
    store = _open_verified(path)
    if store is None and not os.access(path.parent, os.W_OK):
        store = _verify(path)  # on a read-only volume verified.json cannot be written
    if store:
        return store
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f"{key}.lock"), timeout=LOCK_TIMEOUT_SEC):
            store = _open_verified(path)  # another process may have built or verified it while this one waited
            return store or _verify(path) or _build(path, identity, tokenizer(), write)
    except (PermissionError, NotADirectoryError, FileExistsError) as problem:
        raise UsageError(
            f"Cannot use the cache directory {cache_dir}: {problem.strerror or problem}.",
            remedy="Set data.cache_dir to a writable directory.",
        ) from None
    except Timeout:
        raise UsageError(
            f"Another process has held the lock of {path} for a day.", remedy="Stop it, or set data.cache_dir."
        ) from None
    except OSError as problem:
        remedy = "Set data.cache_dir to another directory."
        if is_full(problem):
            remedy = "Free disk space, or set data.cache_dir to another disk."
        raise DataError(f"Cannot write tokens to {cache_dir}: {problem.strerror or problem}.", remedy=remedy) from None


def _open(path: Path) -> StoreDirectory:
    meta = read_json(path / META)
    return StoreDirectory(path, meta if isinstance(meta, dict) else {})


def _open_verified(path: Path) -> StoreDirectory | None:
    """The store if its files are unchanged since they were verified."""
    store = _open(path)
    stamps = store.stamps()
    if stamps is None or stamps != read_json(path / VERIFIED):
        return None
    return store


def _verify(path: Path) -> StoreDirectory | None:
    """The store, after reading and hashing every file; None if it is missing or damaged."""
    if not is_there(path):
        return None
    store = _open(path)
    stamps = store.stamps()  # before hashing: a concurrent change is detected at the next start
    if lacks_checksums(store.meta):
        log("DATA", f"token store {path} was written by an earlier version without checksums; rebuilding it")
        return None
    damage: str | None = "a file is missing or has the wrong size"
    if stamps is not None:
        damage = next(_damage(store), None)
    if damage:
        warn("DATA", f"token store {path} is damaged ({damage}); rebuilding it")
        return None
    with contextlib.suppress(OSError):  # the next start verifies it again
        write_json(path / VERIFIED, stamps)
    return store


def _damage(store: StoreDirectory) -> Iterator[str]:
    """What is wrong with the files."""
    total = sum(store.meta["sizes"].values())
    log("DATA", f"verifying the SHA-256 of token store {store.path} ({total / 1e6:.1f} MB)")
    for name, sha256 in store.meta["sha256"].items():
        try:
            if file_sha256(store.path / name) != sha256:
                yield f"{name} does not match its SHA-256"
        except OSError as problem:
            yield f"cannot read {name}: {problem.strerror or problem}"


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
        meta = json.loads(json.dumps(facts))  # as read back: tuples become lists
        meta["meta_sha256"] = _meta_sha256(meta)
        write_json(temporary / META, meta)
        write_json(temporary / VERIFIED, StoreDirectory(temporary, meta).stamps())
        if path.exists():  # damaged, otherwise it would have been opened
            shutil.rmtree(path)
        temporary.rename(path)
        fsync_dir(path.parent)
        return StoreDirectory(path, meta)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
