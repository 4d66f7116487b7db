"""Tokenized preference pairs on disk: an ExampleStore with two examples per pair, each answer with its prompt."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmtrain.data.store.directory import StoreDirectory, Write
from llmtrain.data.store.example_store import EncodedExample, ExampleStore, SourceFile, characters, example_writer
from llmtrain.data.store.token_store import TokenizeProgress, in_groups
from llmtrain.data.text_and_examples import Example, Split
from llmtrain.data.tokenizers.base import Ids, Tokenizer


@dataclass(frozen=True)
class PairStore:
    """The pairs of one split."""

    answers: ExampleStore
    """Example 2 n is the chosen answer of pair n, example 2 n + 1 the rejected one."""

    @classmethod
    def open(cls, directory: StoreDirectory, split: Split) -> "PairStore":
        return cls(ExampleStore.open(directory, split))

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def path(self) -> Path:
        return self.answers.path

    @property
    def tokens(self) -> npt.NDArray[Any]:
        return self.answers.tokens

    @property
    def pair_count(self) -> int:
        return self.answers.example_count // 2

    @property
    def lengths(self) -> npt.NDArray[np.int64]:  # (pairs, 2)
        """Tokens of each answer with its prompt."""
        return self.answers.lengths.reshape(-1, 2)

    def location(self, pair: int) -> tuple[SourceFile, int]:
        """Source file of a pair, and its number there."""
        return self.answers.location(2 * pair)


def pair_writer(examples: Callable[[Split], Iterable[Example]], threads: int) -> Write:
    """A function for open_or_build that writes the pairs of a split. The segments of an example are the prompt, the
    chosen and the rejected answer."""
    return example_writer(examples, threads, _encode, "answer")


def _encode(
    examples: Iterable[Example],
    tokenizer: Tokenizer,
    dtype: type[np.unsignedinteger[Any]],
    threads: int,
    progress: TokenizeProgress,
) -> Iterator[EncodedExample]:
    """Two encoded examples per pair. Prompt and answer are tokenized as one text, as the model reads them, so a token
    may have the end of the prompt and the beginning of the answer: it belongs to the answer."""
    prefix = np.array(tokenizer.prefix_ids(), dtype)
    end = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], dtype)
    for group in in_groups(examples, characters):
        texts: list[str] = []
        for example in group:
            prompt, *answers = (segment.text for segment in example.segments)
            texts += [prompt, *(prompt + answer for answer in answers)]
        encoded = iter(tokenizer.encode_many(texts, threads))
        for example in group:
            prompt_ids, chosen, rejected = (next(encoded).astype(dtype, copy=False) for _ in range(3))
            if not example.segments[0].text:  # the prompt is what both texts begin with
                prompt_ids = chosen[: common_length(chosen, rejected)]
            for ids in (chosen, rejected):
                first = common_length(prompt_ids, ids)
                parts = [ids]
                if example.begins_special:
                    first += len(prefix)
                    parts.insert(0, prefix)
                if example.ends_text:
                    parts.append(end)
                whole = np.concatenate(parts)
                is_answer = (np.arange(len(whole)) >= first).astype(np.uint8)
                yield EncodedExample(whole, is_answer, SourceFile(example.source, example.unit), example.line)
            progress.characters += characters(example)
        progress.log()


def common_length(one: Ids, other: Ids) -> int:
    """Number of ids at the beginning that are the same."""
    count = min(len(one), len(other))
    differs = np.flatnonzero(one[:count] != other[:count])
    return int(differs[0]) if len(differs) else count
