"""Putting rows of different lengths into as few sequences of one length as possible: best fit, longest first.

Where a row fits is looked up in a bit set of the free capacities, so a million rows take a few seconds.
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
    """Each item in one bin, the sum of lengths in no bin above the capacity. Lengths lie in 1 ... capacity."""
    order = np.argsort(-lengths, kind="stable")
    bin_of = np.empty(len(order), dtype=np.int64)
    bins_with: list[list[int]] = [[] for _ in range(capacity + 1)]  # by free capacity
    free, count = 0, 0  # bit c of `free`: some bin has c left
    for index, length in enumerate(lengths[order].tolist()):
        fitting = free >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            number = bins_with[room].pop()
            if not bins_with[room]:
                free ^= 1 << room
        else:
            room, number, count = capacity, count, count + 1
        bin_of[index] = number
        left = room - length
        if left:
            bins_with[left].append(number)
            free |= 1 << left
    by_bin = np.argsort(bin_of, kind="stable")
    borders = np.searchsorted(bin_of[by_bin], np.arange(count + 1))
    return Bins(order[by_bin], borders.astype(np.int64))


def one_each(count: int) -> Bins:
    """Every item in a bin of its own."""
    return Bins(np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64))
