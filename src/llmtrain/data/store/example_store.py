"""Tokenized examples on disk, memory-mapped.

<split>.bin           tokens of all examples, concatenated
<split>.answers.bin   one byte per token: 1 if it is part of an answer
<split>.rows.bin      int64 (examples, 4): start, end, index of the source file, number in it
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

from llmtrain.compat.run_files import source_units
from llmtrain.core.text import plural
from llmtrain.data.store.directory import StoreDirectory, Write, Written
from llmtrain.data.store.token_store import TokenizeProgress, in_groups, map_array, smallest_dtype
from llmtrain.data.text_and_examples import Example, Split
from llmtrain.data.tokenizers.base import Ids, Tokenizer
from llmtrain.errors import DataError


@dataclass(frozen=True)
class ExampleStore:
    """The examples of one split."""

    path: Path
    """The file of the tokens; for a store in memory, the file the examples were read from."""
    tokens: npt.NDArray[Any]
    answers: npt.NDArray[np.uint8]
    spans: npt.NDArray[np.int64]  # (examples, 4): start, end, index of the source file, number in it
    files: tuple["SourceFile", ...]
    is_mapped: bool = True

    @classmethod
    def open(cls, directory: StoreDirectory, split: Split) -> "ExampleStore":
        facts = directory.facts(split)
        files = tuple(map(SourceFile, facts["files"], source_units(facts)))
        return _open_examples(directory.path, split, facts["dtype"], files)

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
        locations = np.array([(files.index(example.file), example.line) for example in encoded], dtype=np.int64)
        spans = np.column_stack([ends - lengths, ends, locations])
        tokens = np.concatenate([example.ids for example in encoded])
        answers = np.concatenate([example.answers for example in encoded])
        return cls(Path(files.in_order[0].name), tokens, answers, spans, files.in_order, is_mapped=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def example_count(self) -> int:
        return len(self.spans)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return self.spans[:, 1] - self.spans[:, 0]

    def location(self, example: int) -> tuple["SourceFile", int]:
        """Source file of an example, and its number there."""
        return self.files[self.spans[example, 2]], int(self.spans[example, 3])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by path: worker processes map the files instead of receiving their content."""
        if self.is_mapped:
            return _open_examples, (self.path.parent, self.path.stem, self.tokens.dtype.str, self.files)
        return ExampleStore, (self.path, self.tokens, self.answers, self.spans, self.files, False)


def _open_examples(directory: Path, split: str, dtype: str, files: tuple["SourceFile", ...]) -> ExampleStore:
    spans = map_array(directory / f"{split}.rows.bin", "<i8").reshape(-1, 4)
    answers = map_array(directory / f"{split}.answers.bin", "|u1")
    path = directory / f"{split}.bin"
    return ExampleStore(path, map_array(path, dtype), answers, spans, files)


class SourceFile(NamedTuple):
    name: str
    """The name as the user wrote it."""
    unit: str
    """What the numbers of its examples count: `line`, `row` or `record`."""


class SourceFiles:
    """Source files with their indexes, in order of first use."""

    def __init__(self) -> None:
        self._indexes: dict[SourceFile, int] = {}

    def index(self, file: SourceFile) -> int:
        return self._indexes.setdefault(file, len(self._indexes))

    @property
    def in_order(self) -> tuple[SourceFile, ...]:
        return tuple(self._indexes)


Encode = Callable[
    [Iterable[Example], Tokenizer, type[np.unsignedinteger[Any]], int, TokenizeProgress], Iterator["EncodedExample"]
]
"""Tokenizes examples with a number of threads."""


def example_writer(
    examples: Callable[[Split], Iterable[Example]],
    threads: int,
    encode: "Encode | None" = None,
    noun: str = "example",
) -> Write:
    """A function for open_or_build that writes the examples of a split. `encode`: by default each segment of an example
    is tokenized on its own. `noun`: what it yields."""
    encode = encode or _encode

    def write(directory: Path, split: Split, tokenizer: Tokenizer) -> Written:
        dtype = smallest_dtype(tokenizer.vocab_size)
        # The digest does not cover source files and lines: the same examples from elsewhere are the same data.
        digest = hashlib.sha256()
        files = SourceFiles()
        progress = TokenizeProgress(f"{split} examples")
        position = count = 0
        with ExitStack() as stack:
            tokens, answers, spans = (
                stack.enter_context((directory / f"{split}{part}.bin").open("wb")) for part in ("", ".answers", ".rows")
            )
            for example in encode(examples(split), tokenizer, dtype, threads, progress):
                end = position + len(example.ids)
                span = np.array([position, end, files.index(example.file), example.line], dtype="<i8")
                for file, data in ((tokens, example.ids), (answers, example.answers), (spans, span)):
                    file.write(data.tobytes())
                for data in (example.ids, example.answers, span[:2]):
                    digest.update(data.tobytes())
                position = end
                count += 1
            for file in (tokens, answers, spans):
                file.flush()
                os.fsync(file.fileno())
        if not count:
            label = "training" if split == "train" else "validation"
            raise DataError(f"There are no {label} examples.")
        progress.finish(position, f" of {plural(count, noun)}")
        names, units = zip(*files.in_order, strict=True)
        facts = {"dtype": np.dtype(dtype).str, "files": list(names), "units": list(units)}
        return Written(position, digest.hexdigest(), facts)

    return write


class EncodedExample(NamedTuple):
    ids: Ids
    answers: npt.NDArray[np.uint8]
    file: SourceFile
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
    for group in in_groups(examples, characters):
        texts: list[str] = []
        for example in group:
            texts += [segment.text for segment in example.segments]
        encoded = iter(tokenizer.encode_many(texts, threads))
        for example in group:
            parts = []
            if example.begins_special:
                parts.append((prefix, False))
            for segment in example.segments:
                parts.append((next(encoded).astype(dtype, copy=False), segment.is_answer))
            if example.ends_text:
                parts.append((end, True))
            ids = np.concatenate([part for part, _ in parts])
            answers = np.concatenate([np.full(len(part), is_answer, np.uint8) for part, is_answer in parts])
            progress.characters += characters(example)
            yield EncodedExample(ids, answers, SourceFile(example.source, example.unit), example.line)
        progress.log()


def characters(example: Example) -> int:
    return sum(len(segment.text) for segment in example.segments)
