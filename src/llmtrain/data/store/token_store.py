"""Running text as tokens on disk, memory-mapped: one file a split, documents one behind another."""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from llmtrain.data.store.directory import StoreDirectory, Write, Written
from llmtrain.data.tokenizers.base import Tokenizer
from llmtrain.data.types import Split, TextChunk
from llmtrain.errors import DataError
from llmtrain.logs import log

GROUP_CHARACTERS = 4 << 20  # text handed to the tokenizer at once
PROGRESS_SEC = 2.0
Item = TypeVar("Item")


@dataclass(frozen=True)
class TokenStore:
    """The tokens of one split."""

    path: Path
    tokens: npt.NDArray[Any]

    @classmethod
    def open(cls, folder: StoreDirectory, split: Split) -> "TokenStore":
        return _open_tokens(folder.path / f"{split}.bin", folder.facts(split)["dtype"])

    def __len__(self) -> int:
        return len(self.tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        """Worker processes map the file themselves instead of being sent its content."""
        return _open_tokens, (self.path, self.tokens.dtype.str)


def map_array(path: Path, dtype: str) -> npt.NDArray[Any]:
    """A plain array over the map: slicing a memmap object itself is several times slower."""
    return np.asarray(np.memmap(path, dtype=np.dtype(dtype), mode="r"))


def _open_tokens(path: Path, dtype: str) -> TokenStore:
    return TokenStore(path, map_array(path, dtype))


def text_writer(chunks: Callable[[Split], Iterable[TextChunk]], threads: int) -> Write:
    """Writes the text of a split for open_or_build."""

    def write(folder: Path, split: Split, tokenizer: Tokenizer) -> Written:
        dtype = smallest_dtype(tokenizer.vocab_size)
        written = write_tokens(folder / f"{split}.bin", chunks(split), tokenizer, dtype, threads, split)
        if not written.count:
            raise DataError(
                f"The {'training' if split == 'train' else 'validation'} text is empty.",
                remedy="Check data.files, data.val_files and data.val_fraction."
                if split == "train"
                else "Name more text, or raise data.val_fraction.",
            )
        return written

    return write


def write_tokens(
    path: Path,
    chunks: Iterable[TextChunk],
    tokenizer: Tokenizer,
    dtype: type[np.unsignedinteger[Any]],
    threads: int,
    label: str,
) -> Written:
    """Tokenise chunks into one file, a group at a time, so that memory does not grow with the text."""
    digest, count = hashlib.sha256(), 0
    progress = TokenizeProgress(label)
    separator = np.array([tokenizer.end_of_text], dtype) if tokenizer.end_of_text is not None else None
    with path.open("wb") as file:
        for group in in_groups(chunks, lambda piece: len(piece.text)):
            for piece, ids in zip(group, tokenizer.encode_many([p.text for p in group], threads), strict=True):
                parts = [ids.astype(dtype, copy=False)]
                if piece.ends_document and separator is not None:
                    parts.append(separator)
                for part in parts:
                    data = part.tobytes()
                    file.write(data)
                    digest.update(data)
                    count += len(part)
                progress.characters += len(piece.text)
            progress.say()
        file.flush()
        os.fsync(file.fileno())
    progress.finish(count)
    return Written(count, digest.hexdigest(), {"dtype": np.dtype(dtype).str})


class TokenizeProgress:
    """Log lines of a long tokenisation, one every few seconds."""

    def __init__(self, label: str) -> None:
        self.characters = 0
        self._label = label
        self._started = self._said = time.monotonic()

    def say(self) -> None:
        if time.monotonic() - self._said > PROGRESS_SEC:
            self._said = time.monotonic()
            rate = self.characters / 1e6 / (self._said - self._started)
            log("DATA", f"tokenising {self._label}: {self.characters / 1e6:.0f} M characters, {rate:.1f} M/s")

    def finish(self, tokens: int, of: str = "") -> None:
        seconds = time.monotonic() - self._started
        source = f"{self.characters:,} characters{of}"
        log("DATA", f"tokenised {self._label}: {tokens:,} tokens from {source} in {seconds:.1f} s")


def in_groups(items: Iterable[Item], size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Neighbours together, about GROUP_CHARACTERS at a time."""
    group: list[Item] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def smallest_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    if vocab_size <= 1 << 8:
        return np.uint8
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32
