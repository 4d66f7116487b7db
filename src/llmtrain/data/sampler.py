"""Position -> samples. Which windows of text a step sees is a pure function of (seed, step, micro-index).

An epoch cuts the tokens into windows of block_size, at an offset of its own, and visits them in an order of its
own, each once. The order is a keyed permutation computed on the fly (a Feistel network), not a shuffled list: it
needs no memory, so a corpus of any size works, and any position can be asked for at once, so resuming is free.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
ROUNDS = 6
RUN = 8192


@dataclass(frozen=True)
class WindowSampler:
    tokens: int
    block_size: int
    seed: int

    @property
    def windows(self) -> int:
        """Windows in an epoch. A window needs one token more than block_size: the last target."""
        whole = (self.tokens - 1) // self.block_size
        return whole - 1 if whole > 1 else whole

    def epoch_of(self, sample: int) -> int:
        return sample // self.windows

    def starts(self, first_sample: int, count: int) -> Positions:
        """Where the windows of samples first_sample ... +count begin. Samples are counted over all epochs."""
        parts = []
        while count:
            epoch, index = divmod(first_sample, self.windows)
            run = _run_of_starts(self, epoch, index // RUN)[index % RUN :][:count]
            parts.append(run)
            first_sample, count = first_sample + len(run), count - len(run)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@lru_cache(maxsize=4)
def _run_of_starts(sampler: WindowSampler, epoch: int, number: int) -> Positions:
    """RUN neighbouring positions of an epoch at once: numpy's cost a call is then shared by many batches."""
    indexes = np.arange(number * RUN, min((number + 1) * RUN, sampler.windows))
    order = permute(indexes, sampler.windows, derive_seed(sampler.seed, "order", epoch))
    # A different cut of the text each epoch, so that windows do not always begin at the same tokens.
    room = sampler.tokens - 1 - sampler.windows * sampler.block_size
    return derive_seed(sampler.seed, "offset", epoch) % (room + 1) + order * sampler.block_size


def derive_seed(seed: int, *parts: int | str) -> int:
    """63 bits that depend on all the parts, on no machine and no library version."""
    digest = hashlib.sha256("/".join(map(str, (seed, *parts))).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def permute(values: Positions, size: int, key: int) -> Positions:
    """A permutation of range(size), evaluated at `values`."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    keys = [np.uint64(derive_seed(key, "round", i)) for i in range(ROUNDS)]
    out = values.astype(np.uint64)
    # The network permutes a power of four that may be larger than size: walk on until inside (under 4 rounds).
    outside = np.ones(len(out), bool)
    while outside.any():
        walking = out[outside]
        left, right = walking >> shift, walking & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        out[outside] = (left << shift) | right
        outside = out >= size
    return out.astype(np.int64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A well-known 64-bit finaliser (splitmix64); numpy wraps around by itself."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
