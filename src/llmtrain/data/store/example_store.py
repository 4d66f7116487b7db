"""Rows as tokens on disk, memory-mapped.

<split>.bin           tokens of all rows, one row behind another
<split>.answers.bin   a byte a token: 1 where it is part of an answer
<split>.rows.bin      int64 (rows, 4): start, end, index of the source file, line
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmtrain.data.store.directory import StoreDirectory, Write, Written
from llmtrain.data.store.token_store import TokenizeProgress, in_groups, map_array, smallest_dtype
from llmtrain.data.tokenizers.base import Ids, Tokenizer
from llmtrain.data.types import Example, Split
from llmtrain.errors import DataError


@dataclass(frozen=True)
class ExampleStore:
    """The rows of one split."""

    path: Path
    """Of the tokens; for rows in memory, of the file they were read from."""
    tokens: npt.NDArray[Any]
    answers: npt.NDArray[np.uint8]
    spans: npt.NDArray[np.int64]  # (rows, 4)
    files: tuple[str, ...]
    is_mapped: bool = True

    @classmethod
    def open(cls, folder: StoreDirectory, split: Split) -> "ExampleStore":
        facts = folder.facts(split)
        return _open_rows(folder.path, split, facts["dtype"], tuple(facts["files"]))

    @classmethod
    def from_examples(cls, rows: Iterable[Example], tokenizer: Tokenizer, threads: int) -> "ExampleStore":
        """In memory, for rows that are read once."""
        dtype = smallest_dtype(tokenizer.vocab_size)
        encoded, files, progress = [], Files(), TokenizeProgress("rows")
        for row in _encode(rows, tokenizer, dtype, threads, progress):
            encoded.append(row)
        if not encoded:
            raise DataError("There are no rows.")
        lengths = np.array([len(row.ids) for row in encoded], dtype=np.int64)
        ends = np.cumsum(lengths)
        places = np.array([(files.index(row.source), row.line) for row in encoded], dtype=np.int64)
        spans = np.column_stack([ends - lengths, ends, places])
        tokens, answers = (np.concatenate(parts) for parts in zip(*((r.ids, r.answers) for r in encoded), strict=True))
        return cls(Path(files.names[0]), tokens, answers, spans, tuple(files.names), is_mapped=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def example_count(self) -> int:
        return len(self.spans)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return self.spans[:, 1] - self.spans[:, 0]

    def place(self, row: int) -> tuple[str, int]:
        """File and line a row came from."""
        return self.files[self.spans[row, 2]], int(self.spans[row, 3])

    def __reduce__(self) -> tuple[Any, ...]:
        """Worker processes map the files themselves instead of being sent their content."""
        if self.is_mapped:
            return _open_rows, (self.path.parent, self.path.stem, self.tokens.dtype.str, self.files)
        return ExampleStore, (self.path, self.tokens, self.answers, self.spans, self.files, False)


def _open_rows(folder: Path, split: str, dtype: str, files: tuple[str, ...]) -> ExampleStore:
    spans = map_array(folder / f"{split}.rows.bin", "<i8").reshape(-1, 4)
    answers = map_array(folder / f"{split}.answers.bin", "|u1")
    path = folder / f"{split}.bin"
    return ExampleStore(path, map_array(path, dtype), answers, spans, files)


class Files:
    """Source names in the order of their first row, each with its index."""

    def __init__(self) -> None:
        self._indexes: dict[str, int] = {}

    def index(self, name: str) -> int:
        return self._indexes.setdefault(name, len(self._indexes))

    @property
    def names(self) -> list[str]:
        return list(self._indexes)


def example_writer(rows: Callable[[Split], Iterable[Example]], threads: int) -> Write:
    """Writes the rows of a split for open_or_build."""

    def write(folder: Path, split: Split, tokenizer: Tokenizer) -> Written:
        dtype = smallest_dtype(tokenizer.vocab_size)
        # Where rows came from is no part of the digest: the same rows elsewhere are the same data.
        digest, files, position, progress = hashlib.sha256(), Files(), 0, TokenizeProgress(f"{split} rows")
        count = 0
        with ExitStack() as stack:
            tokens, answers, spans = (
                stack.enter_context((folder / f"{split}{part}.bin").open("wb")) for part in ("", ".answers", ".rows")
            )
            for row in _encode(rows(split), tokenizer, dtype, threads, progress):
                end = position + len(row.ids)
                span = np.array([position, end, files.index(row.source), row.line], dtype="<i8")
                for file, data in ((tokens, row.ids), (answers, row.answers), (spans, span)):
                    file.write(data.tobytes())
                for data in (row.ids, row.answers, span[:2]):
                    digest.update(data.tobytes())
                position, count = end, count + 1
            for file in (tokens, answers, spans):
                file.flush()
                os.fsync(file.fileno())
        if not count:
            raise DataError(f"There are no {'training' if split == 'train' else 'validation'} rows.")
        progress.finish(position, f" of {count:,} rows")
        return Written(position, digest.hexdigest(), {"dtype": np.dtype(dtype).str, "files": files.names})

    return write


class EncodedExample(NamedTuple):
    ids: Ids
    answers: npt.NDArray[np.uint8]
    source: str
    line: int


def _encode(
    rows: Iterable[Example],
    tokenizer: Tokenizer,
    dtype: type[np.unsignedinteger[Any]],
    threads: int,
    progress: TokenizeProgress,
) -> Iterator[EncodedExample]:
    """Tokenise rows a group at a time, so that memory does not grow with their number."""
    prefix = np.array(tokenizer.prefix_ids(), dtype)
    end = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], dtype)
    for group in in_groups(rows, lambda row: sum(len(segment.text) for segment in row.segments)):
        encoded = iter(tokenizer.encode_many([segment.text for row in group for segment in row.segments], threads))
        for row in group:
            parts = [(prefix, False)] if row.begins_special else []
            parts += [(next(encoded).astype(dtype, copy=False), segment.is_answer) for segment in row.segments]
            parts += [(end, True)] if row.ends_text else []
            ids = np.concatenate([part for part, _ in parts])
            answers = np.repeat(
                np.array([is_answer for _, is_answer in parts], np.uint8), [len(part) for part, _ in parts]
            )
            progress.characters += sum(len(segment.text) for segment in row.segments)
            yield EncodedExample(ids, answers, row.source, row.line)
        progress.say()
