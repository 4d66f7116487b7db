import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.core.seeds import derive_seed
from llmtrain.data.sampler import BLOCK, WindowSampler, permute

seeds = st.integers(0, 2**63 - 1)
samplers = st.builds(
    lambda block, windows, rest, seed: WindowSampler(block * windows + 1 + rest, block, seed),
    block=st.integers(1, 20),
    windows=st.integers(1, 60),
    rest=st.integers(0, 19),
    seed=seeds,
)


@given(size=st.integers(1, 3000), key=seeds)
def test_permute_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


@given(size=st.integers(1, 2**50), key=seeds, first=st.floats(0, 1))
def test_permute_of_a_huge_range_stays_inside_without_repetition(size: int, key: int, first: float) -> None:
    start = int(first * (size - 1))
    values = np.arange(start, min(size, start + 50))
    out = permute(values, size, key)
    assert len(set(out.tolist())) == len(values)
    assert ((out >= 0) & (out < size)).all()


def test_permute_shuffles() -> None:
    out = permute(np.arange(10_000), 10_000, 1)
    assert np.abs(np.corrcoef(out, np.arange(10_000))[0, 1]) < 0.05
    assert (np.diff(out) == 1).sum() < 10


def test_permute_is_elementwise() -> None:
    whole = permute(np.arange(1000), 1000, 5)
    assert [int(permute(np.array([i]), 1000, 5)[0]) for i in range(0, 1000, 37)] == whole[::37].tolist()


@given(sampler=samplers, epoch=st.integers(0, 5))
def test_an_epoch_visits_every_window_once(sampler: WindowSampler, epoch: int) -> None:
    starts = np.sort(sampler.starts(epoch * sampler.windows, sampler.windows))
    # adjacent windows, without overlap or gap
    assert (np.diff(starts) == sampler.block_size).all()


@given(sampler=samplers, first=st.integers(0, 500), count=st.integers(1, 200))
def test_windows_and_their_last_targets_are_inside_the_text(sampler: WindowSampler, first: int, count: int) -> None:
    starts = sampler.starts(first, count)
    assert len(starts) == count
    assert starts.min() >= 0
    assert starts.max() + sampler.block_size <= sampler.tokens - 1


@given(sampler=samplers, first=st.integers(0, 300), count=st.integers(1, 150), split=st.floats(0, 1))
def test_starts_depend_on_the_position_only(sampler: WindowSampler, first: int, count: int, split: float) -> None:
    """Sample n is the same window regardless of how samples are requested, also across epochs."""
    whole = sampler.starts(first, count).tolist()
    middle = max(1, int(split * count))
    parts = sampler.starts(first + middle, count - middle).tolist() if middle < count else []
    again = WindowSampler(sampler.tokens, sampler.block_size, sampler.seed)
    assert again.starts(first, middle).tolist() + parts == whole
    assert [int(again.starts(first + i, 1)[0]) for i in range(0, count, 17)] == whole[::17]


def test_epochs_differ_in_order_and_offset() -> None:
    sampler = WindowSampler(tokens=20 * 50 + 1, block_size=20, seed=1)
    epochs = [sampler.starts(e * sampler.windows, sampler.windows) for e in range(4)]
    assert len({tuple(epoch // 20) for epoch in epochs}) == 4
    assert len({int(epoch[0] % 20) for epoch in epochs}) > 1


def test_order_depends_on_the_seed() -> None:
    first, second = (WindowSampler(10_001, 10, seed).starts(0, 50).tolist() for seed in (1, 2))
    assert first != second


def test_more_windows_than_one_block() -> None:
    sampler = WindowSampler(tokens=BLOCK * 3 + 2, block_size=1, seed=3)
    starts = sampler.starts(0, sampler.windows)
    assert len(set(starts.tolist())) == sampler.windows > 2 * BLOCK
    assert starts[BLOCK - 5 : BLOCK + 5].tolist() == sampler.starts(BLOCK - 5, 10).tolist()


@pytest.mark.parametrize(("tokens", "block", "windows"), [(11, 10, 1), (21, 10, 1), (31, 10, 2), (2, 1, 1)])
def test_windows_per_epoch(tokens: int, block: int, windows: int) -> None:
    """One window fewer than fits, so that the offset can vary; all of them if only one fits."""
    assert WindowSampler(tokens, block, 0).windows == windows


def test_derived_seeds_never_change() -> None:
    """A different value would change every run that a newer version resumes."""
    assert derive_seed(1337, "order", 0) == 5359426737860580503
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert permute(np.arange(8), 8, 42).tolist() == [1, 4, 7, 6, 5, 2, 0, 3]
