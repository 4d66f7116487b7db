"""Packing examples of different lengths into as few sequences as possible: best fit decreasing.

A bit set of the free capacities finds the best bin in constant time, so a million examples take a few seconds.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indexes = npt.NDArray[np.int64]


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
    """Assign each item to one bin; no bin's total length exceeds the capacity. 1 <= length <= capacity."""
    order = np.argsort(-lengths, kind="stable")
    bin_of = np.empty(len(order), dtype=np.int64)
    bins_by_free: list[list[int]] = [[] for _ in range(capacity + 1)]  # free capacity -> bin numbers
    free_bits, count = 0, 0  # bit c of free_bits: some bin has c free
    for index, length in enumerate(lengths[order].tolist()):
        fitting = free_bits >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1  # the lowest set bit: the smallest that fits
            number = bins_by_free[free].pop()
            if not bins_by_free[free]:
                free_bits ^= 1 << free
        else:
            free, number, count = capacity, count, count + 1
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
