"""Tokens on disk, memory-mapped: made once for a source and a tokenizer, then only opened.

    <cache_dir>/tokens/<key>/   train.bin  val.bin  tokenizer/  meta.json

The key is a hash of what decides the tokens. The directory is made under another name and renamed when complete,
so it is there whole or not at all; a file lock lets one process make it while others wait.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from llmtrain.data.tokenizer import Tokenizer, is_saved_tokenizer, load_saved_tokenizer
from llmtrain.errors import DataError, UsageError
from llmtrain.logs import log, warn
from llmtrain.runs.atomic import fsync_dir, is_there, read_json, write_json

if TYPE_CHECKING:
    from llmtrain.data.base import Piece, Split

FORMAT_VERSION = 1
GROUP_CHARACTERS = 4 << 20  # text handed to the tokenizer at once
PROGRESS_SEC = 2.0
WAIT_FOR_OTHER_SEC = 24 * 3600


@dataclass(frozen=True)
class TokenStore:
    """The tokens of one split."""

    path: Path
    tokens: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        """Worker processes map the file themselves instead of being sent its content."""
        return _open_tokens, (self.path, self.tokens.dtype.str)


def _open_tokens(path: Path, dtype: str) -> TokenStore:
    # A plain array over the map: slicing a memmap object itself is several times slower.
    return TokenStore(path, np.asarray(np.memmap(path, dtype=np.dtype(dtype), mode="r")))


@dataclass(frozen=True)
class StoreFolder:
    path: Path
    meta: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return str(self.meta["fingerprint"])

    def tokenizer(self) -> Tokenizer:
        return load_saved_tokenizer(self.path / "tokenizer")

    def open(self, split: "Split") -> TokenStore:
        return _open_tokens(self.path / f"{split}.bin", str(self.meta["dtype"]))

    def is_whole(self) -> bool:
        """Every file there and as long as it was when written."""
        try:
            item = np.dtype(self.meta["dtype"]).itemsize
            return is_saved_tokenizer(self.path / "tokenizer") and all(
                (self.path / f"{split}.bin").stat().st_size == count * item
                for split, count in self.meta["tokens"].items()
            )
        except (OSError, KeyError, TypeError):
            return False


def open_or_build(
    cache_dir: Path,
    identity: dict[str, Any],
    tokenizer: Callable[[], Tokenizer],
    pieces: "Callable[[Split], Iterator[Piece]]",
    threads: int,
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
            return found or _build(path, identity, tokenizer(), pieces, threads)
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


def _build(
    path: Path,
    identity: dict[str, Any],
    tokenizer: Tokenizer,
    pieces: "Callable[[Split], Iterator[Piece]]",
    threads: int,
) -> StoreFolder:
    temporary = path.with_name(f"{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        dtype = smallest_dtype(tokenizer.vocab_size)
        counts, digests = {}, []
        splits: tuple[Split, Split] = ("train", "val")
        for split in splits:
            written = write_tokens(temporary / f"{split}.bin", pieces(split), tokenizer, dtype, threads, split)
            counts[split] = written.count
            digests.append(written.sha256)
            if not written.count:
                raise DataError(
                    f"The {'training' if split == 'train' else 'validation'} text is empty.",
                    remedy="Check data.files, data.val_files and data.val_fraction."
                    if split == "train"
                    else "Name more text, or raise data.val_fraction.",
                )
        tokenizer.save(temporary / "tokenizer")
        meta = {
            "identity": identity,
            "dtype": np.dtype(dtype).str,
            "tokens": counts,
            "fingerprint": hashlib.sha256("".join(digests).encode()).hexdigest(),
        }
        write_json(temporary / "meta.json", meta)
        if path.exists():  # damaged, or it would have been opened
            shutil.rmtree(path)
        temporary.rename(path)
        fsync_dir(path.parent)
        return StoreFolder(path, meta)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@dataclass(frozen=True)
class Written:
    count: int
    sha256: str


def write_tokens(
    path: Path,
    pieces: "Iterable[Piece]",
    tokenizer: Tokenizer,
    dtype: type[np.unsignedinteger[Any]],
    threads: int,
    label: str,
) -> Written:
    """Tokenise pieces into one file, a group at a time, so that memory does not grow with the text."""
    digest, count, characters = hashlib.sha256(), 0, 0
    started = said = time.monotonic()
    separator = np.array([tokenizer.end_of_text], dtype) if tokenizer.end_of_text is not None else None
    with path.open("wb") as file:
        for group in _groups(pieces):
            for piece, ids in zip(group, tokenizer.encode_many([p.text for p in group], threads), strict=True):
                parts = [ids.astype(dtype, copy=False)]
                if piece.ends_document and separator is not None:
                    parts.append(separator)
                for part in parts:
                    data = part.tobytes()
                    file.write(data)
                    digest.update(data)
                    count += len(part)
                characters += len(piece.text)
            if time.monotonic() - said > PROGRESS_SEC:
                said = time.monotonic()
                rate = characters / 1e6 / (said - started)
                log("DATA", f"tokenising {label}: {characters / 1e6:.0f} M characters, {rate:.1f} M/s")
        file.flush()
        os.fsync(file.fileno())
    seconds = time.monotonic() - started
    log("DATA", f"tokenised {label}: {count:,} tokens from {characters:,} characters in {seconds:.1f} s")
    return Written(count, digest.hexdigest())


def _groups(pieces: "Iterable[Piece]") -> "Iterator[list[Piece]]":
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if size >= GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def smallest_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    if vocab_size <= 1 << 8:
        return np.uint8
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32
