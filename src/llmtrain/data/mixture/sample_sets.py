"""What a source of a mixture offers: samples by their number, counted over all epochs of the source.

SampleSet            length, tokens, batch(numbers)
├── WindowSet        windows of running text
└── ShuffledSet
    ├── ExampleSet   examples, or sequences of packed examples
    └── PairSet      preference pairs, or sequences of packed pairs
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from llmtrain.core.seeds import derive_seed
from llmtrain.core.targets import IGNORE_INDEX
from llmtrain.data.batches import Batch, Indexes, Pairs
from llmtrain.data.examples.example_batches import Samples, locations
from llmtrain.data.preferences.pair_batches import PairSamples, References
from llmtrain.data.sampler import WindowSampler, permute
from llmtrain.data.store.token_store import TokenStore
from llmtrain.data.text.window_batches import check_length, read_windows, window_batch


class Part(NamedTuple):
    """What one source contributes to a batch."""

    samples: "SampleSet"
    numbers: Indexes
    rows: Indexes
    """Rows of the batch, one per number."""


class SampleSet(ABC):
    """The training samples of a source, in an order of their own per epoch."""

    kind: str
    """What its samples are, for messages. The sources of a mixture have one kind."""
    has_equal_lengths = True
    """Whether all batches have the same shape."""

    @abstractmethod
    def __len__(self) -> int:
        """Samples per epoch."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Input tokens per epoch."""

    @abstractmethod
    def batch(self, numbers: Indexes) -> Batch:
        """The samples with these numbers, in this order."""

    @abstractmethod
    def lengths(self, numbers: Indexes) -> Indexes:
        """Input tokens of each sample."""

    @classmethod
    def mixed(cls, parts: Sequence[Part], first_sample: int) -> Batch:
        """A batch of samples of several sets of this kind."""
        return join([part.samples.batch(part.numbers) for part in parts], parts, first_sample)

    def describe(self, numbers: Indexes) -> str:
        """Where these samples come from, for messages."""
        return f"{len(numbers)} samples from {numbers[0]} on"


class WindowSet(SampleSet):
    kind = "text"

    def __init__(
        self, store: TokenStore, block_size: int, seed: int, vocab_size: int, document_end: int | None = None
    ) -> None:
        check_length(store, block_size, "training")
        self.store = store
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.document_end = document_end
        self.sampler = WindowSampler(len(store), block_size, seed)

    def __len__(self) -> int:
        return self.sampler.windows

    @property
    def tokens(self) -> int:
        return self.sampler.windows * self.block_size

    def batch(self, numbers: Indexes) -> Batch:
        return self.mixed([Part(self, numbers, np.arange(len(numbers)))], int(numbers[0]))

    @classmethod
    def mixed(cls, parts: Sequence[Part], first_sample: int) -> Batch:
        """Copies each window once: joining batches would take longer than reading them."""
        sets = [part.samples for part in parts if isinstance(part.samples, cls)]
        windows = [each._windows(part.numbers) for each, part in zip(sets, parts, strict=True)]
        together = np.empty((sum(map(len, windows)), windows[0].shape[1]), np.int64)  # (B, T + 1)
        for part, read in zip(parts, windows, strict=True):
            together[part.rows] = read
        return window_batch(together, first_sample, sets[0].document_end)

    def _windows(self, numbers: Indexes) -> npt.NDArray[Any]:
        first = int(numbers.min())
        starts = self.sampler.starts(first, int(numbers.max()) - first + 1)[numbers - first]
        return read_windows(self.store, starts, self.block_size, self.vocab_size)

    def lengths(self, numbers: Indexes) -> Indexes:
        return np.full(len(numbers), self.block_size)


class ShuffledSet(SampleSet):
    """Samples with an order of their own in each epoch."""

    def __init__(self, samples: Samples | PairSamples, seed: int) -> None:
        self.samples = samples
        self.seed = seed
        self.has_equal_lengths = samples.packed

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, numbers: Indexes) -> Batch:
        return self.samples.batch(self.chosen(numbers), int(numbers[0]))

    @classmethod
    def mixed(cls, parts: Sequence[Part], first_sample: int) -> Batch:
        """A batch of samples of several sets of this kind."""
        return join([part.samples.batch(part.numbers) for part in parts], parts, first_sample)

    def chosen(self, numbers: Indexes) -> Indexes:
        """The samples with these numbers."""
        epochs, indexes = np.divmod(numbers, len(self.samples))
        chosen = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            is_in_epoch = epochs == epoch
            key = derive_seed(self.seed, "rows", int(epoch))
            chosen[is_in_epoch] = permute(indexes[is_in_epoch], len(self.samples), key)
        return chosen


class ExampleSet(ShuffledSet):
    samples: Samples

    def __init__(self, samples: Samples, seed: int) -> None:
        super().__init__(samples, seed)
        self.kind = "packed examples" if samples.packed else "examples"

    @property
    def tokens(self) -> int:
        return int(self.samples.selection.lengths.sum())

    def lengths(self, numbers: Indexes) -> Indexes:
        if self.samples.packed:
            return np.full(len(numbers), self.samples.block_size)
        return self.samples.selection.lengths[self.chosen(numbers)]

    def describe(self, numbers: Indexes) -> str:
        return locations(self.samples.store, self.samples.examples(self.chosen(numbers)))


class PairSet(ShuffledSet):
    samples: PairSamples

    def __init__(self, samples: PairSamples, seed: int) -> None:
        super().__init__(samples, seed)
        self.kind = "packed pairs" if samples.packed else "pairs"

    def with_references(self, references: References) -> "PairSet":
        """The same pairs with the log-probabilities of the model at step 0."""
        return PairSet(replace(self.samples, references=references), self.seed)

    @property
    def tokens(self) -> int:
        return int(self.samples.positions.sum())

    def lengths(self, numbers: Indexes) -> Indexes:
        if self.samples.packed:
            return np.full(len(numbers), 2 * self.samples.block_size)
        return self.samples.longest[self.chosen(numbers)]

    def describe(self, numbers: Indexes) -> str:
        pairs = self.samples.pairs_of(self.chosen(numbers))
        return locations(self.samples.store.answers, [2 * pair for pair in pairs])


def join(batches: Sequence[Batch], parts: Sequence[Part], first_sample: int) -> Batch:
    """One batch of several, padded to the longest."""
    width = max(batch.inputs.shape[1] for batch in batches)
    rows_per_sample = len(batches[0].inputs) // len(parts[0].numbers)  # two for a pair that is not packed
    in_batch = np.concatenate([part.rows for part in parts])[:, None] * rows_per_sample + np.arange(rows_per_sample)
    order = torch.from_numpy(np.argsort(in_batch.reshape(-1)))

    def rows(tensors: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
        padded = [pad(tensor, (0, width - tensor.shape[1]), value=fill) for tensor in tensors]
        return torch.cat(padded)[order]

    positions = [batch.positions for batch in batches if batch.positions is not None]
    return Batch(
        rows([batch.inputs for batch in batches], 0),
        rows([batch.targets for batch in batches], IGNORE_INDEX),
        sum(batch.target_count for batch in batches),
        first_sample,
        sum(batch.token_count for batch in batches),
        rows(positions, 0) if positions else None,  # packed sequences all have the same width
        _joined_pairs([batch.pairs for batch in batches if batch.pairs is not None], rows),
    )


def _joined_pairs(pairs: Sequence[Pairs], rows: Callable[[Sequence[torch.Tensor], int], torch.Tensor]) -> Pairs | None:
    """The answers of each batch are numbered after those of the one before."""
    if not pairs:
        return None
    answers = []
    count = 0
    for each in pairs:
        answers.append(each.answers + count)
        count += len(each.lengths)
    references = [each.reference for each in pairs if each.reference is not None]
    return Pairs(
        rows(answers, 0),
        torch.cat([each.lengths for each in pairs]),
        torch.cat(references) if references else None,
    )
