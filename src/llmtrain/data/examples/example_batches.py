"""Batches of examples: several per sequence (packed), or one per sequence, padded to the longest.

Their order is decided by ExampleBatches.order_of; that of windows of running text by data/sampler.py.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from llmtrain.core.seeds import derive_seed
from llmtrain.core.targets import IGNORE_INDEX
from llmtrain.data.batches import (
    NO_SAMPLE,
    Batch,
    EpochBatches,
    EvalBatches,
    Indexes,
    check_vocabulary,
    evenly_spaced,
    whole_batches,
)
from llmtrain.data.examples.selection import Selection
from llmtrain.data.sampler import permute
from llmtrain.data.store.example_store import ExampleStore, SourceFile

SORT_POOL = 64
"""Micro-batches whose examples are sorted by length together: enough for little padding, few enough to mix well."""
LENGTH_MULTIPLE = 16
"""Unpacked sequences are padded to a multiple: fast kernels, and few shapes to compile."""


@dataclass(frozen=True)
class Bins:
    """Items of bin b: items[borders[b] : borders[b + 1]]."""

    items: Indexes
    borders: Indexes

    def __len__(self) -> int:
        return len(self.borders) - 1

    def __getitem__(self, number: int) -> Indexes:
        return self.items[self.borders[number] : self.borders[number + 1]]


def pack(lengths: Indexes, capacity: int) -> Bins:
    """Assign each item to one bin, best fit decreasing; no bin's total length exceeds the capacity. 1 <= length <=
    capacity. A bit set of the free capacities finds the best bin in constant time, so a million examples take a few
    seconds."""
    order = np.argsort(-lengths, kind="stable")
    bin_of = np.empty(len(order), dtype=np.int64)
    bins_by_free: list[list[int]] = [[] for _ in range(capacity + 1)]  # free capacity -> bin numbers
    free_bits = 0  # bit c: some bin has c free
    count = 0  # of bins
    for index, length in enumerate(lengths[order].tolist()):
        fitting = free_bits >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1  # the lowest set bit: the smallest that fits
            number = bins_by_free[free].pop()
            if not bins_by_free[free]:
                free_bits ^= 1 << free
        else:
            free = capacity
            number = count
            count += 1
        bin_of[index] = number
        remaining = free - length
        if remaining:
            bins_by_free[remaining].append(number)
            free_bits |= 1 << remaining
    by_bin = np.argsort(bin_of, kind="stable")
    borders = np.searchsorted(bin_of[by_bin], np.arange(count + 1))
    return Bins(order[by_bin], borders.astype(np.int64))


def one_per_bin(count: int) -> Bins:
    """Every item in its own bin."""
    return Bins(np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64))


@dataclass(frozen=True)
class Samples:
    """The samples of a split; a sample is one sequence: one example, or several packed ones."""

    store: ExampleStore
    selection: Selection
    block_size: int
    packed: bool
    vocab_size: int
    train_on_prompt: bool
    bins: Bins = field(init=False)

    def __post_init__(self) -> None:
        bins = pack(self.selection.lengths, self.block_size) if self.packed else one_per_bin(len(self.selection))
        object.__setattr__(self, "bins", bins)

    def __len__(self) -> int:
        return len(self.bins)

    def examples(self, samples: Indexes) -> list[int]:
        """Indexes in the store of the examples of these samples."""
        examples: list[int] = []
        for sample in samples[samples != NO_SAMPLE]:
            examples += self.selection.examples[self.bins[sample]].tolist()
        return examples

    def batch(self, samples: Indexes, first_sample: int) -> Batch:
        """A batch of these samples; NO_SAMPLE becomes a sequence without loss."""
        width = self.width(samples)
        inputs = np.zeros((len(samples), width), dtype=np.int64)  # (B, T)
        targets = np.full((len(samples), width), IGNORE_INDEX, dtype=np.int64)
        positions = np.zeros((len(samples), width), dtype=np.int64)
        token_count = max_id = 0
        for index, sample in enumerate(samples):
            position = 0  # where the next example of this sequence begins
            items = () if sample == NO_SAMPLE else self.bins[sample]
            for item in items:
                length = int(self.selection.lengths[item])
                start = int(self.store.spans[self.selection.examples[item], 0])
                ids = self.store.tokens[start : start + length + 1]
                max_id = max(max_id, int(ids.max()))
                place = slice(position, position + length)
                inputs[index, place] = ids[:-1]
                targets[index, place] = ids[1:]
                if not self.train_on_prompt:
                    is_prompt = self.store.answers[start + 1 : start + length + 1] == 0
                    targets[index, place][is_prompt] = IGNORE_INDEX
                positions[index, place] = np.arange(length)
                position += length
            token_count += position
            positions[index, position:] = np.arange(width - position)  # the padding is an example of its own
        check_vocabulary(max_id, self.vocab_size, self.store.path)
        return Batch(
            torch.from_numpy(inputs),
            torch.from_numpy(targets),
            int((targets != IGNORE_INDEX).sum()),
            first_sample,
            token_count,
            torch.from_numpy(positions) if self.packed else None,
        )

    def width(self, samples: Indexes) -> int:
        """Length of the sequences of a batch of these samples."""
        if self.packed:
            return self.block_size
        real = samples[samples != NO_SAMPLE]  # unpacked: sample i is example i of the selection
        longest = int(self.selection.lengths[real].max()) if len(real) else 1
        return min(-(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, self.block_size)

    def shape(self, samples: Indexes) -> tuple[int, int]:
        """(sequences, tokens) of a batch of these samples."""
        return len(samples), self.width(samples)


class ExampleBatches(EpochBatches):
    samples: Samples

    def __init__(self, samples: Samples, micro_batch_size: int, micro_batches: int, seed: int) -> None:
        super().__init__(micro_batch_size, micro_batches, seed)
        self.samples = samples

    @property
    def tokens(self) -> int:
        return int(self.samples.selection.lengths.sum())

    def describe_samples(self, step: int) -> str:
        examples = self.samples.examples(self.samples_of_step(step))
        return f"{super().describe_samples(step)} ({locations(self.samples.store, examples)})"

    def order_of(self, epoch: int) -> Indexes:
        count = len(self.samples)
        order = permute(np.arange(count), count, derive_seed(self.seed, "rows", epoch))
        filled = whole_batches(order, self.size)
        if self.samples.packed:
            return filled
        pool = SORT_POOL * self.size
        lengths = self.samples.selection.lengths
        for first in range(0, count, pool):
            part = order[first : first + pool]
            filled[first : first + len(part)] = part[np.argsort(lengths[part], kind="stable")]
        # Shuffle only micro-batches with examples: the empty ones stay in the last step.
        real = len(filled) // self.size
        shuffled = permute(np.arange(real), real, derive_seed(self.seed, "micro-batches", epoch))
        return filled.reshape(-1, self.size)[shuffled].reshape(-1)


class ExampleEvalBatches(EvalBatches):
    """All examples in a fixed order, packed or sorted by length; with a limit, evenly spaced batches of it."""

    def __init__(self, samples: Samples, micro_batch_size: int, limit: int | None = None) -> None:
        self.samples = samples
        self.size = micro_batch_size
        order = np.arange(len(samples))
        if not samples.packed:
            order = np.argsort(samples.selection.lengths, kind="stable")
        self._order = whole_batches(order, micro_batch_size)
        self._chosen = evenly_spaced(len(self._order) // micro_batch_size, limit)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Batch:
        return self.samples.batch(self._samples_of(index), int(self._chosen[index]) * self.size)

    def largest_shape(self) -> tuple[int, int]:
        """The last one: the examples are sorted by length, or packed."""
        return self.samples.shape(self._samples_of(-1))

    def _samples_of(self, index: int) -> Indexes:
        first = int(self._chosen[index]) * self.size
        return self._order[first : first + self.size]


def locations(store: ExampleStore, examples: list[int], limit: int = 3) -> str:
    """`train.jsonl lines 4, 17, 230, ...`"""
    numbers: dict[SourceFile, list[str]] = {}
    for file, number in map(store.location, examples[:limit]):
        numbers.setdefault(file, []).append(str(number))
    parts = []
    for file, some in numbers.items():
        unit = f"{file.unit}s" if len(some) > 1 else file.unit
        parts.append(f"{file.name} {unit} {', '.join(some)}")
    text = "; ".join(parts)
    return f"{text}, ..." if len(examples) > limit else text
