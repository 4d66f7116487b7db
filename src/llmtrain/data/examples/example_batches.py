"""Batches of examples: several per sequence (packed), or one per sequence, padded to the longest.

An epoch is a whole number of steps. Its last step is filled up with samples without loss, so every example occurs
exactly once per epoch, and the examples of micro-batch n depend on nothing but n and the seed.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from llmtrain.data.batches import IGNORE_INDEX, Batch, EvalBatches, TrainBatches, check_vocabulary, evenly_spaced
from llmtrain.data.examples.packing import Bins, Indexes, one_per_bin, pack
from llmtrain.data.examples.selection import Selection
from llmtrain.data.sampler import derive_seed, permute
from llmtrain.data.store.example_store import ExampleStore

SORT_POOL = 64
"""Micro-batches whose examples are sorted by length together: enough for little padding, few enough to mix well."""
LENGTH_MULTIPLE = 16
"""Unpacked sequences are padded to a multiple: fast kernels, and few shapes to compile."""
NO_SAMPLE = -1


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
        return [int(self.selection.examples[i]) for sample in samples if sample != NO_SAMPLE for i in self.bins[sample]]

    def batch(self, samples: Indexes, first_sample: int) -> Batch:
        """A batch of these samples; NO_SAMPLE becomes a sequence without loss."""
        width = self._width(samples)
        inputs = np.zeros((len(samples), width), dtype=np.int64)
        targets = np.full((len(samples), width), IGNORE_INDEX, dtype=np.int64)
        positions = np.zeros((len(samples), width), dtype=np.int64) if self.packed else None
        token_count = max_id = 0
        for index, sample in enumerate(samples):
            position = 0
            for item in self.bins[sample] if sample != NO_SAMPLE else ():
                length = int(self.selection.lengths[item])
                start = int(self.store.spans[self.selection.examples[item], 0])
                ids = self.store.tokens[start : start + length + 1]
                max_id = max(max_id, int(ids.max()))
                inputs[index, position : position + length] = ids[:-1]
                is_target = self.store.answers[start + 1 : start + length + 1] != 0
                targets[index, position : position + length] = (
                    ids[1:] if self.train_on_prompt else np.where(is_target, ids[1:].astype(np.int64), IGNORE_INDEX)
                )
                if positions is not None:
                    positions[index, position : position + length] = np.arange(length)
                position += length
            token_count += position
            if positions is not None:
                positions[index, position:] = np.arange(width - position)
        check_vocabulary(max_id, self.vocab_size, self.store.path)
        return Batch(
            torch.from_numpy(inputs),
            torch.from_numpy(targets),
            int((targets != IGNORE_INDEX).sum()),
            first_sample,
            token_count,
            None if positions is None else torch.from_numpy(positions),
        )

    def _width(self, samples: Indexes) -> int:
        if self.packed:
            return self.block_size
        real = samples[samples != NO_SAMPLE]  # unpacked: sample i is example i of the selection
        longest = int(self.selection.lengths[real].max()) if len(real) else 1
        return min(-(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, self.block_size)


class ExampleBatches(TrainBatches):
    def __init__(self, samples: Samples, micro_batch_size: int, micro_batches: int, seed: int) -> None:
        super().__init__(micro_batch_size, micro_batches)
        self.samples, self.seed = samples, seed
        self._order: tuple[int, Indexes] | None = None  # (epoch, order) of the last epoch: a cache

    @property
    def steps_in_epoch(self) -> int:
        return -(-len(self.samples) // (self.size * self.micro_batches))

    def steps_in(self, epochs: int) -> int:
        return epochs * self.steps_in_epoch

    def epochs_after(self, step: int) -> int:
        return step // self.steps_in_epoch

    @property
    def tokens(self) -> int:
        return int(self.samples.selection.lengths.sum())

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps_in_epoch

    def __getitem__(self, number: int) -> Batch:
        return self.samples.batch(self._samples_of(number), number * self.size)

    def describe_samples(self, step: int) -> str:
        numbers = range((step - 1) * self.micro_batches, step * self.micro_batches)
        examples = self.samples.examples(np.concatenate([self._samples_of(number) for number in numbers]))
        return f"{super().describe_samples(step)} ({_locations(self.samples.store, examples)})"

    def _samples_of(self, number: int) -> Indexes:
        epoch, index = divmod(number, self.steps_in_epoch * self.micro_batches)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._order_of(epoch)
        return self._order[1][index * self.size : (index + 1) * self.size]

    def _order_of(self, epoch: int) -> Indexes:
        """All samples of an epoch in order, followed by NO_SAMPLE up to a whole number of steps."""
        count = len(self.samples)
        order = permute(np.arange(count), count, derive_seed(self.seed, "rows", epoch))
        filled = np.full(self.steps_in_epoch * self.micro_batches * self.size, NO_SAMPLE, dtype=np.int64)
        filled[:count] = order
        if self.samples.packed:
            return filled
        pool = SORT_POOL * self.size
        lengths = self.samples.selection.lengths
        for first in range(0, count, pool):
            part = order[first : first + pool]
            filled[first : first + len(part)] = part[np.argsort(lengths[part], kind="stable")]
        # Shuffle only micro-batches with examples: the empty ones stay in the last step.
        real = -(-count // self.size)
        shuffled = permute(np.arange(real), real, derive_seed(self.seed, "micro-batches", epoch))
        by_micro_batch = filled.reshape(-1, self.size)
        by_micro_batch[:real] = by_micro_batch[shuffled]
        return by_micro_batch.reshape(-1)


class ExampleEvalBatches(EvalBatches):
    """All examples in a fixed order, packed or sorted by length; with a limit, evenly spaced batches of it."""

    def __init__(self, samples: Samples, micro_batch_size: int, limit: int | None = None) -> None:
        self.samples, self.size = samples, micro_batch_size
        count = len(samples)
        batches = -(-count // micro_batch_size)
        self._order = np.full(batches * micro_batch_size, NO_SAMPLE, dtype=np.int64)
        self._order[:count] = (
            np.arange(count) if samples.packed else np.argsort(samples.selection.lengths, kind="stable")
        )
        self._chosen = evenly_spaced(batches, limit)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Batch:
        first = int(self._chosen[index]) * self.size
        return self.samples.batch(self._order[first : first + self.size], first)


def _locations(store: ExampleStore, examples: list[int], limit: int = 3) -> str:
    """`train.jsonl lines 4, 17, 230, ...`"""
    lines: dict[str, list[str]] = {}
    for file, line in map(store.location, examples[:limit]):
        lines.setdefault(file, []).append(str(line))
    text = "; ".join(f"{file} line{'s' * (len(some) > 1)} {', '.join(some)}" for file, some in lines.items())
    return f"{text}, ..." if len(examples) > limit else text
