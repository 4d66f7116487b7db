"""What a source of a mixture offers: samples by their number, counted over all epochs of the source.

SampleSet        length, tokens, batch(numbers)
├── WindowSet    windows of running text
└── ExampleSet   examples, or sequences of packed examples
"""

from abc import ABC, abstractmethod

import numpy as np

from llmtrain.core.seeds import derive_seed
from llmtrain.data.batches import Batch
from llmtrain.data.examples.example_batches import Samples, locations
from llmtrain.data.examples.selection import Indexes
from llmtrain.data.sampler import WindowSampler, permute
from llmtrain.data.store.token_store import TokenStore
from llmtrain.data.text.window_batches import check_length, read_windows


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

    def describe(self, numbers: Indexes) -> str:
        """Where these samples come from, for messages."""
        return f"{len(numbers)} samples from {numbers[0]} on"


class WindowSet(SampleSet):
    kind = "text"

    def __init__(self, store: TokenStore, block_size: int, seed: int, vocab_size: int) -> None:
        check_length(store, block_size, "training")
        self.store = store
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.sampler = WindowSampler(len(store), block_size, seed)

    def __len__(self) -> int:
        return self.sampler.windows

    @property
    def tokens(self) -> int:
        return self.sampler.windows * self.block_size

    def batch(self, numbers: Indexes) -> Batch:
        first = int(numbers.min())
        starts = self.sampler.starts(first, int(numbers.max()) - first + 1)[numbers - first]
        return read_windows(self.store, starts, self.block_size, self.vocab_size, first)

    def lengths(self, numbers: Indexes) -> Indexes:
        return np.full(len(numbers), self.block_size)


class ExampleSet(SampleSet):
    def __init__(self, samples: Samples, seed: int) -> None:
        self.samples = samples
        self.seed = seed
        self.kind = "packed examples" if samples.packed else "examples"
        self.has_equal_lengths = samples.packed

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def tokens(self) -> int:
        return int(self.samples.selection.lengths.sum())

    def batch(self, numbers: Indexes) -> Batch:
        return self.samples.batch(self._chosen(numbers), int(numbers[0]))

    def lengths(self, numbers: Indexes) -> Indexes:
        if self.samples.packed:
            return np.full(len(numbers), self.samples.block_size)
        return self.samples.selection.lengths[self._chosen(numbers)]

    def describe(self, numbers: Indexes) -> str:
        return locations(self.samples.store, self.samples.examples(self._chosen(numbers)))

    def _chosen(self, numbers: Indexes) -> Indexes:
        """The samples with these numbers: each epoch has an order of its own."""
        epochs, indexes = np.divmod(numbers, len(self.samples))
        chosen = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            is_in_epoch = epochs == epoch
            key = derive_seed(self.seed, "rows", int(epoch))
            chosen[is_in_epoch] = permute(indexes[is_in_epoch], len(self.samples), key)
        return chosen
