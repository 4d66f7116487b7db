"""Tokenized examples on disk, memory-mapped.

<split>.bin           tokens of all examples, concatenated
<split>.answers.bin   one byte per token: 1 if it is part of an answer
<split>.rows.bin      int64 (examples, 4): start, end, index of the source file, line
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
from llmtrain.text import plural


@dataclass(frozen=True)
class ExampleStore:
    """The examples of one split."""

    path: Path
    """The file of the tokens; for a store in memory, the file the examples were read from."""
    tokens: npt.NDArray[Any]
    answers: npt.NDArray[np.uint8]
    spans: npt.NDArray[np.int64]  # (examples, 4): start, end, index of the source file, line
    files: tuple[str, ...]
    is_mapped: bool = True

    @classmethod
    def open(cls, directory: StoreDirectory, split: Split) -> "ExampleStore":
        facts = directory.facts(split)
        return _open_examples(directory.path, split, facts["dtype"], tuple(facts["files"]))

    @classmethod
    def from_examples(cls, examples: Iterable[Example], tokenizer: Tokenizer, threads: int) -> "ExampleStore":
        """A store in memory, for examples that are read once."""
        dtype = smallest_dtype(tokenizer.vocab_size)
        encoded = list(_encode(examples, tokenizer, dtype, threads, TokenizeProgress("examples")))
        if not encoded:
            raise DataError("There are no examples.")
        files = SourceFiles()
        lengths = np.array([len(example.ids) for example in encoded], dtype=np.int64)
        ends = np.cumsum(lengths)
        locations = np.array([(files.index(example.source), example.line) for example in encoded], dtype=np.int64)
        spans = np.column_stack([ends - lengths, ends, locations])
        tokens = np.concatenate([example.ids for example in encoded])
        answers = np.concatenate([example.answers for example in encoded])
        return cls(Path(files.names[0]), tokens, answers, spans, tuple(files.names), is_mapped=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def example_count(self) -> int:
        return len(self.spans)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return self.spans[:, 1] - self.spans[:, 0]

    def location(self, example: int) -> tuple[str, int]:
        """Source file and line of an example."""
        return self.files[self.spans[example, 2]], int(self.spans[example, 3])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by path: worker processes map the files instead of receiving their content."""
        if self.is_mapped:
            return _open_examples, (self.path.parent, self.path.stem, self.tokens.dtype.str, self.files)
        return ExampleStore, (self.path, self.tokens, self.answers, self.spans, self.files, False)


def _open_examples(directory: Path, split: str, dtype: str, files: tuple[str, ...]) -> ExampleStore:
    spans = map_array(directory / f"{split}.rows.bin", "<i8").reshape(-1, 4)
    answers = map_array(directory / f"{split}.answers.bin", "|u1")
    path = directory / f"{split}.bin"
    return ExampleStore(path, map_array(path, dtype), answers, spans, files)


class SourceFiles:
    """Names of source files with their indexes, in order of first use."""

    def __init__(self) -> None:
        self._indexes: dict[str, int] = {}

    def index(self, name: str) -> int:
        return self._indexes.setdefault(name, len(self._indexes))

    @property
    def names(self) -> list[str]:
        return list(self._indexes)


def example_writer(examples: Callable[[Split], Iterable[Example]], threads: int) -> Write:
    """A function for open_or_build that writes the examples of a split."""

    def write(directory: Path, split: Split, tokenizer: Tokenizer) -> Written:
        dtype = smallest_dtype(tokenizer.vocab_size)
        # The digest does not cover source files and lines: the same examples from elsewhere are the same data.
        digest, files, progress = hashlib.sha256(), SourceFiles(), TokenizeProgress(f"{split} examples")
        position = count = 0
        with ExitStack() as stack:
            tokens, answers, spans = (
                stack.enter_context((directory / f"{split}{part}.bin").open("wb")) for part in ("", ".answers", ".rows")
            )
            for example in _encode(examples(split), tokenizer, dtype, threads, progress):
                end = position + len(example.ids)
                span = np.array([position, end, files.index(example.source), example.line], dtype="<i8")
                for file, data in ((tokens, example.ids), (answers, example.answers), (spans, span)):
                    file.write(data.tobytes())
                for data in (example.ids, example.answers, span[:2]):
                    digest.update(data.tobytes())
                position, count = end, count + 1
            for file in (tokens, answers, spans):
                file.flush()
                os.fsync(file.fileno())
        if not count:
            raise DataError(f"There are no {'training' if split == 'train' else 'validation'} examples.")
        progress.finish(position, f" of {plural(count, 'example')}")
        return Written(position, digest.hexdigest(), {"dtype": np.dtype(dtype).str, "files": files.names})

    return write


class EncodedExample(NamedTuple):
    ids: Ids
    answers: npt.NDArray[np.uint8]
    source: str
    line: int


def _encode(
    examples: Iterable[Example],
    tokenizer: Tokenizer,
    dtype: type[np.unsignedinteger[Any]],
    threads: int,
    progress: TokenizeProgress,
) -> Iterator[EncodedExample]:
    """Tokenize examples in groups, so that memory does not grow with their number."""
    prefix = np.array(tokenizer.prefix_ids(), dtype)
    end = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], dtype)
    for group in in_groups(examples, _characters):
        texts = [segment.text for example in group for segment in example.segments]
        encoded = iter(tokenizer.encode_many(texts, threads))
        for example in group:
            parts = [(prefix, False)] if example.begins_special else []
            parts += [(next(encoded).astype(dtype, copy=False), segment.is_answer) for segment in example.segments]
            parts += [(end, True)] if example.ends_text else []
            ids = np.concatenate([part for part, _ in parts])
            answers = np.repeat(
                np.array([is_answer for _, is_answer in parts], np.uint8), [len(part) for part, _ in parts]
            )
            progress.characters += _characters(example)
            yield EncodedExample(ids, answers, example.source, example.line)
        progress.log()


def _characters(example: Example) -> int:
    return sum(len(segment.text) for segment in example.segments)
