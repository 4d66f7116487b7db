import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.data.examples.example_batches import one_per_bin, pack


def lengths_of(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def brute_force(values: list[int], capacity: int) -> int:
    """Number of bins that best fit decreasing needs, by exhaustive search."""
    free: list[int] = []
    for value in sorted(values, reverse=True):
        fits = [space for space in free if space >= value]
        if fits:
            free[free.index(min(fits))] -= value
        else:
            free.append(capacity - value)
    return len(free)


@given(st.integers(1, 40).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=60))))
def test_every_item_once_and_no_bin_over_capacity(case: tuple[int, list[int]]) -> None:
    capacity, values = case
    bins = pack(lengths_of(values), capacity)
    assert sorted(bins.items.tolist()) == list(range(len(values)))
    assert [i for number in range(len(bins)) for i in bins[number]] == bins.items.tolist()
    for number in range(len(bins)):
        assert 0 < lengths_of(values)[bins[number]].sum() <= capacity
    assert len(bins) == brute_force(values, capacity)


def test_item_goes_to_the_best_fit() -> None:
    bins = pack(lengths_of([7, 6, 3, 4]), 10)
    assert [sorted(bins[number].tolist()) for number in range(len(bins))] == [[0, 2], [1, 3]]


def test_packing_is_deterministic() -> None:
    values = np.random.default_rng(0).integers(1, 100, 5000)
    first, second = pack(values, 100), pack(values.copy(), 100)
    assert np.array_equal(first.items, second.items)
    assert np.array_equal(first.borders, second.borders)


def test_packing_is_dense_and_fast() -> None:
    values = np.minimum(np.random.default_rng(0).lognormal(5, 0.9, 100_000).astype(np.int64) + 2, 512)
    started = time.process_time()
    bins = pack(values, 512)
    assert time.process_time() - started < 5  # 0.1 s; a search through all bins would take minutes
    assert values.sum() / (len(bins) * 512) > 0.99


@pytest.mark.parametrize("count", [0, 1, 5])
def test_one_per_bin(count: int) -> None:
    bins = one_per_bin(count)
    assert [bins[number].tolist() for number in range(len(bins))] == [[i] for i in range(count)]
