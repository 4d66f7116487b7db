"""Batches of preference pairs: packed, several pairs per sequence, or one sequence per answer, padded to the longest.

A sample is what a micro-batch counts: one pair, or several packed ones. Its sequences have at most block_size tokens
per answer, so a packed one has twice that. Which pairs a step has depends on the seed and on the number of samples per
step, and not on how many micro-batches they are divided into.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from llmtrain.config.data import PreferenceJsonlSection
from llmtrain.core.seeds import derive_seed
from llmtrain.core.targets import IGNORE_INDEX
from llmtrain.data.batches import (
    NO_SAMPLE,
    Batch,
    EpochBatches,
    EvalBatches,
    Indexes,
    Pairs,
    check_vocabulary,
    evenly_spaced,
    whole_batches,
)
from llmtrain.data.examples.example_batches import LENGTH_MULTIPLE, Bins, locations, one_per_bin, pack
from llmtrain.data.examples.selection import count_targets, warn_count
from llmtrain.data.preferences.pair_store import PairStore
from llmtrain.data.sampler import permute
from llmtrain.errors import DataError, UsageError

References = npt.NDArray[np.float32]
"""(pairs of the store, 2): log-probabilities of the chosen and the rejected answer at step 0."""


def select_pairs(store: PairStore, config: PreferenceJsonlSection, block_size: int, label: str) -> Indexes:
    """The pairs whose answers fit into block_size with their prompt."""
    lengths = store.lengths - 1  # positions: tokens without the last
    is_long = lengths.max(axis=1) > block_size
    if is_long.any() and config.on_bad_example == "error":
        raise _too_long(store, block_size, label)
    has_targets = (count_targets(store.answers, store.answers.lengths - 1).reshape(-1, 2) > 0).all(axis=1)
    warn_count(is_long, label, f"dropped: longer than model.block_size {block_size}", "pairs")
    warn_count(~has_targets & ~is_long, label, "dropped: an answer has no token behind another one", "pairs")
    selected = np.flatnonzero(has_targets & ~is_long)
    if not len(selected):
        raise DataError(
            f"None of the {store.pair_count:,} {label} pairs can be used at model.block_size {block_size}: they need "
            f"{lengths.max(axis=1).min():,} to {lengths.max():,}.",
            remedy="Raise model.block_size, as far as the model has positions, or use shorter pairs.",
        )
    return selected


def _too_long(store: PairStore, block_size: int, label: str) -> DataError:
    longest = store.lengths.max(axis=1)
    is_long = longest - 1 > block_size
    first = int(np.flatnonzero(is_long)[0])
    file, number = store.location(first)
    others = int(is_long.sum()) - 1
    more = f"; {others:,} more {label} pairs are too long" if others else ""
    return DataError(
        f"{file.name}, {file.unit} {number}: the longer answer of the pair has {longest[first]:,} tokens with its "
        f"prompt, more than model.block_size {block_size}{more}.",
        remedy=f"Raise model.block_size (the longest pair needs {longest.max()}), or set data.on_bad_example to skip "
        "to drop such pairs.",
    )


@dataclass(frozen=True)
class PairSamples:
    """The samples of a split."""

    store: PairStore
    pairs: Indexes
    """Those that are used, as indexes in the store."""
    block_size: int
    packed: bool
    vocab_size: int
    references: References | None = None
    bins: Bins = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.pairs)
        # A pair needs the positions of both answers.
        bins = pack(self.positions.sum(axis=1), 2 * self.block_size) if self.packed else one_per_bin(count)
        object.__setattr__(self, "bins", bins)

    def __len__(self) -> int:
        return len(self.bins)

    @property
    def positions(self) -> Indexes:  # (pairs, 2)
        """Input positions of each answer: its tokens and those of its prompt, without the last."""
        return self.store.lengths[self.pairs] - 1

    @property
    def longest(self) -> Indexes:
        """Positions of the longer answer of each pair."""
        longest: Indexes = self.positions.max(axis=1)
        return longest

    def pairs_of(self, samples: Indexes) -> list[int]:
        """Indexes in the store of the pairs of these samples."""
        pairs: list[int] = []
        for sample in samples[samples != NO_SAMPLE]:
            pairs += self.pairs[self.bins[sample]].tolist()
        return pairs

    def batch(self, samples: Indexes, first_sample: int) -> Batch:
        """A batch of these samples; NO_SAMPLE becomes sequences without loss."""
        rows = self._rows(samples)
        shape = len(rows), self.width(samples)
        inputs = np.zeros(shape, dtype=np.int64)  # (B, T)
        targets = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        answers = np.zeros(shape, dtype=np.int64)
        lengths: list[int] = []
        token_count = max_id = 0
        for index, row in enumerate(rows):
            position = 0  # where the next answer of this sequence begins
            for answer in row:
                start, end = self.store.answers.spans[answer, :2].tolist()
                length = end - start - 1
                ids = self.store.answers.tokens[start:end].astype(np.int64)
                max_id = max(max_id, int(ids.max()))
                is_answer = self.store.answers.answers[start + 1 : end] == 1
                place = slice(position, position + length)
                inputs[index, place] = ids[:-1]
                targets[index, place] = np.where(is_answer, ids[1:], IGNORE_INDEX)
                positions[index, place] = np.arange(length)
                answers[index, place] = len(lengths)
                lengths.append(int(is_answer.sum()))
                position += length
            token_count += position
            positions[index, position:] = np.arange(shape[1] - position)  # the padding is an example of its own
        check_vocabulary(max_id, self.vocab_size, self.store.path)
        return Batch(
            torch.from_numpy(inputs),
            torch.from_numpy(targets),
            sum(lengths),
            first_sample,
            token_count,
            torch.from_numpy(positions) if self.packed else None,
            Pairs(torch.from_numpy(answers), torch.tensor(lengths, dtype=torch.int64), self._references(samples)),
        )

    def _rows(self, samples: Indexes) -> list[list[int]]:
        """The answers of each sequence, as indexes in the store."""
        rows: list[list[int]] = []
        for sample in samples:
            pairs = [] if sample == NO_SAMPLE else self.pairs[self.bins[sample]].tolist()
            answers = [2 * pair + side for pair in pairs for side in (0, 1)]
            if self.packed:
                rows.append(answers)
            else:
                rows += [answers[:1], answers[1:]]
        return rows

    def _references(self, samples: Indexes) -> torch.Tensor | None:
        if self.references is None:
            return None
        return torch.from_numpy(self.references[self.pairs_of(samples)].reshape(-1))

    def width(self, samples: Indexes) -> int:
        """Length of the sequences of a batch of these samples."""
        if self.packed:
            return 2 * self.block_size
        real = samples[samples != NO_SAMPLE]  # unpacked: sample i is pair i of those that are used
        longest = int(self.longest[real].max()) if len(real) else 1
        return min(-(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, self.block_size)

    def shape(self, samples: Indexes) -> tuple[int, int]:
        """(sequences, tokens) of a batch of these samples."""
        return len(samples) * (1 if self.packed else 2), self.width(samples)


class PairBatches(EpochBatches):
    samples: PairSamples

    def __init__(self, samples: PairSamples, micro_batch_size: int, micro_batches: int, seed: int) -> None:
        super().__init__(micro_batch_size, micro_batches, seed)
        self.samples = samples

    def with_references(self, references: References) -> "PairBatches":
        """The same batches with the log-probabilities of the model at step 0."""
        samples = replace(self.samples, references=references)
        return PairBatches(samples, self.size, self.micro_batches, self.seed)

    @property
    def tokens(self) -> int:
        return int(self.samples.positions.sum())

    def describe_samples(self, step: int) -> str:
        pairs = self.samples.pairs_of(self.samples_of_step(step))
        places = locations(self.samples.store.answers, [2 * pair for pair in pairs])
        return f"{super().describe_samples(step)} ({places})"

    def order_of(self, epoch: int) -> Indexes:
        """Unpacked samples are sorted by length within a step, so that its micro-batches need little padding."""
        count = len(self.samples)
        per_step = self.size * self.micro_batches
        filled = whole_batches(permute(np.arange(count), count, derive_seed(self.seed, "rows", epoch)), self.size)
        if self.samples.packed:
            return filled
        longest = self.samples.longest
        for first in range(0, count, per_step):
            last = min(first + per_step, count)
            part = filled[first:last]
            filled[first:last] = part[np.argsort(longest[part], kind="stable")]
        return filled


class PairEvalBatches(EvalBatches):
    """All pairs in a fixed order, packed or sorted by length; with a limit, evenly spaced batches of it."""

    def __init__(self, samples: PairSamples, micro_batch_size: int, limit: int | None = None) -> None:
        self.samples = samples
        self.size = micro_batch_size
        self.limit = limit
        order = np.arange(len(samples))
        if not samples.packed:
            order = np.argsort(samples.longest, kind="stable")
        self._order = whole_batches(order, micro_batch_size)
        self._chosen = evenly_spaced(len(self._order) // micro_batch_size, limit)

    def with_references(self, references: References) -> "PairEvalBatches":
        """The same batches with the log-probabilities of the model at step 0."""
        return PairEvalBatches(replace(self.samples, references=references), self.size, self.limit)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Batch:
        return self.samples.batch(self.samples_of(index), int(self._chosen[index]) * self.size)

    def largest_shape(self) -> tuple[int, int]:
        """The last one: the pairs are sorted by length, or packed."""
        return self.samples.shape(self.samples_of(-1))

    def samples_of(self, index: int) -> Indexes:
        first = int(self._chosen[index]) * self.size
        return self._order[first : first + self.size]


def make_pair_samples(
    store: PairStore, config: PreferenceJsonlSection, block_size: int, vocab_size: int, can_pack: bool, label: str
) -> PairSamples:
    if config.packing and not can_pack:
        raise UsageError(
            "data.packing is true, but this model does not keep packed examples separate.",
            remedy="Set data.packing to false.",
        )
    selected = select_pairs(store, config, block_size, label)
    return PairSamples(store, selected, block_size, config.packing, vocab_size)
