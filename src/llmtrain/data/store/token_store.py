"""Tokenized running text on disk, memory-mapped: one file per split, documents concatenated."""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from llmtrain.core.logs import log
from llmtrain.core.progress import detail
from llmtrain.data.store.directory import StoreDirectory, Write, Written
from llmtrain.data.text_and_examples import Split, TextChunk
from llmtrain.data.tokenizers.base import Tokenizer
from llmtrain.errors import DataError, UsageError

GROUP_CHARACTERS = 4 << 20  # per call of the tokenizer
PROGRESS_SEC = 2.0
Item = TypeVar("Item")


@dataclass(frozen=True)
class TokenStore:
    """The tokens of one split."""

    path: Path
    tokens: npt.NDArray[Any]

    @classmethod
    def open(cls, directory: StoreDirectory, split: Split) -> "TokenStore":
        return _open_tokens(directory.path / f"{split}.bin", directory.facts(split)["dtype"])

    def __len__(self) -> int:
        return len(self.tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by path: worker processes map the file instead of receiving its content."""
        return _open_tokens, (self.path, self.tokens.dtype.str)


def map_array(path: Path, dtype: str) -> npt.NDArray[Any]:
    """A plain array over a memory map: slicing an np.memmap object is several times slower."""
    return np.asarray(np.memmap(path, dtype=np.dtype(dtype), mode="r"))


def _open_tokens(path: Path, dtype: str) -> TokenStore:
    return TokenStore(path, map_array(path, dtype))


def text_writer(chunks: Callable[[Split], Iterable[TextChunk]], threads: int, adds_bos: bool = False) -> Write:
    """A function for open_or_build that writes the text of a split."""

    def write(directory: Path, split: Split, tokenizer: Tokenizer) -> Written:
        dtype = smallest_dtype(tokenizer.vocab_size)
        prefix = _prefix(tokenizer) if adds_bos else []
        written = write_tokens(directory / f"{split}.bin", chunks(split), tokenizer, dtype, threads, split, prefix)
        if not written.count:
            if split == "train":
                remedy = "Check data.files, data.val_files, data.val_fraction, and deduplicate if it is true."
                raise DataError("The training text is empty.", remedy=remedy)
            raise DataError("The validation text is empty.", remedy="Add more text, or raise data.val_fraction.")
        return written

    return write


def _prefix(tokenizer: Tokenizer) -> list[int]:
    """What begins every document with data.add_bos."""
    prefix = tokenizer.prefix_ids()
    if not prefix:
        raise UsageError(
            f"data.add_bos is true, but the tokenizer ({tokenizer.kind}) puts no tokens before a text.",
            remedy="Set data.add_bos to false.",
        )
    return prefix


def write_tokens(
    path: Path,
    chunks: Iterable[TextChunk],
    tokenizer: Tokenizer,
    dtype: type[np.unsignedinteger[Any]],
    threads: int,
    label: str,
    prefix: Sequence[int] = (),
) -> Written:
    """Tokenize chunks into one file, in groups, so that memory does not grow with the text. `prefix`: ids before each
    document."""
    digest = hashlib.sha256()
    count = 0
    before = np.array(prefix, dtype)
    begins_document = True
    progress = TokenizeProgress(label)
    separator = np.array([tokenizer.end_of_text], dtype) if tokenizer.end_of_text is not None else None
    with path.open("wb") as file:
        for group in in_groups(chunks, lambda chunk: len(chunk.text)):
            texts = [chunk.text for chunk in group]
            for chunk, ids in zip(group, tokenizer.encode_many(texts, threads), strict=True):
                parts = [ids.astype(dtype, copy=False)]
                if begins_document and len(before):
                    parts.insert(0, before)
                begins_document = chunk.ends_document
                if chunk.ends_document and separator is not None:
                    parts.append(separator)
                for part in parts:
                    data = part.tobytes()
                    file.write(data)
                    digest.update(data)
                    count += len(part)
                progress.characters += len(chunk.text)
            progress.log()
        file.flush()
        os.fsync(file.fileno())
    progress.finish(count)
    return Written(count, digest.hexdigest(), {"dtype": np.dtype(dtype).str})


class TokenizeProgress:
    """Shows the progress of tokenizing: on the live line, else as a log line every few seconds."""

    def __init__(self, label: str) -> None:
        self.characters = 0
        self._label = label
        self._started = self._logged = time.monotonic()

    def log(self) -> None:
        now = time.monotonic()
        rate = self.characters / 1e6 / max(1e-3, now - self._started)
        text = f"tokenizing {self._label}: {self.characters:,} characters"
        if self.characters >= 1e6:
            text = f"tokenizing {self._label}: {self.characters / 1e6:.0f} M characters, {rate:.1f} M/s"
        if not detail(text) and now - self._logged > PROGRESS_SEC:
            self._logged = now
            log("DATA", text)

    def finish(self, tokens: int, of_examples: str = "") -> None:
        seconds = time.monotonic() - self._started
        source = f"{self.characters:,} characters{of_examples}"
        log("DATA", f"tokenized {self._label}: {tokens:,} tokens from {source} in {seconds:.1f} s")


def in_groups(items: Iterable[Item], size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Consecutive items in groups of about GROUP_CHARACTERS."""
    group: list[Item] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= GROUP_CHARACTERS:
            yield group
            group = []
            size = 0
    if group:
        yield group


def smallest_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    if vocab_size <= 1 << 8:
        return np.uint8
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32
