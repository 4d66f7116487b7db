"""Position -> samples: the windows of text in a step are a pure function of (seed, step, micro-index).

Each epoch divides the tokens into windows of block_size, starting at an offset of its own, and visits every window
once, in an order of its own. The order is a keyed permutation computed on the fly (a Feistel network), not a shuffled
list: it needs no memory, so a corpus can have any size, and any position is available at once, so resuming is free.

Other orders, with the same permutation: examples, which are sorted by length or packed, in
data/examples/example_batches.py (order_of); preference pairs in data/preferences/pair_batches.py; which source of a
mixture a sample is from in data/mixture/schedule.py.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from llmtrain.core.seeds import derive_seed

Positions = npt.NDArray[np.int64]
ROUNDS = 6
BLOCK = 8192
"""Samples whose starts are computed at once."""


@dataclass(frozen=True)
class WindowSampler:
    tokens: int
    block_size: int
    seed: int

    @property
    def windows(self) -> int:
        """Windows per epoch. A window needs one token more than block_size: the last target."""
        whole = (self.tokens - 1) // self.block_size
        return whole - 1 if whole > 1 else whole  # one fewer, because the offset of the epoch shifts them

    def starts(self, first_sample: int, count: int) -> Positions:
        """First token of the windows of `count` samples from first_sample on. Samples are counted over all epochs."""
        parts = []
        while count:
            epoch, index = divmod(first_sample, self.windows)
            part = _block_of_starts(self, epoch, index // BLOCK)[index % BLOCK :][:count]
            parts.append(part)
            first_sample += len(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@lru_cache(maxsize=128)  # a mixture may have dozens of sources
def _block_of_starts(sampler: WindowSampler, epoch: int, number: int) -> Positions:
    """Starts of BLOCK consecutive samples of an epoch: numpy's cost per call is shared by many batches."""
    indexes = np.arange(number * BLOCK, min((number + 1) * BLOCK, sampler.windows))
    order = permute(indexes, sampler.windows, derive_seed(sampler.seed, "order", epoch))
    # A different offset per epoch, so that windows do not always begin at the same tokens.
    max_offset = sampler.tokens - 1 - sampler.windows * sampler.block_size
    return derive_seed(sampler.seed, "offset", epoch) % (max_offset + 1) + order * sampler.block_size


def permute(values: Positions, size: int, key: int) -> Positions:
    """A permutation of range(size), evaluated at `values`."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    keys = [np.uint64(derive_seed(key, "round", i)) for i in range(ROUNDS)]
    out = values.astype(np.uint64)
    # The network permutes a power of four, which may be larger than size: repeat until all values are inside
    # (cycle walking, fewer than 4 passes on average).
    outside = np.ones(len(out), bool)
    while outside.any():
        x = out[outside]
        left = x >> shift
        right = x & mask
        for round_key in keys:
            left, right = right, left ^ (mix(right ^ round_key) & mask)
        out[outside] = (left << shift) | right
        outside = out >= size
    return out.astype(np.int64)


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The 64-bit finalizer of splitmix64; numpy's unsigned integers wrap around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
