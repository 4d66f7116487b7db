"""The schedule of a mixture: exact shares, counts that never fall, caps and stages, any position at once."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.data.mixture.schedule import (
    BLOCK,
    MAX_PERIOD,
    SHARE_UNITS,
    MixtureSchedule,
    Quotas,
    Stage,
    shares_in_units,
)

MANY = 400  # blocks
weights = st.lists(st.integers(1, 10_000), min_size=2, max_size=50).map(
    lambda units: tuple(each / 1e4 for each in units)
)
few_weights = st.lists(st.integers(1, 100), min_size=2, max_size=6).map(lambda units: tuple(map(float, units)))


def exact_shares(given: tuple[float, ...]) -> list[Fraction]:
    parts = [Fraction(repr(weight)) for weight in given]
    return [part / sum(parts) for part in parts]


def with_sum_10_000(units: list[int]) -> list[int]:
    shares = [max(1, 10_000 * unit // sum(units)) for unit in units]
    largest = shares.index(max(shares))
    shares[largest] += 10_000 - sum(shares)
    return shares


unit_lists = st.lists(st.integers(1, 10_000), min_size=2, max_size=50)


@given(st.one_of(unit_lists, unit_lists.map(with_sum_10_000)))
@settings(max_examples=40, deadline=None)
def test_counts_at_block_borders_never_fall_and_are_within_one_of_the_share(units: list[int]) -> None:
    quotas = Quotas([unit / 1e4 for unit in units])
    totals = np.arange(MANY)[:, None] * BLOCK
    counts = np.array([quotas.before(block) for block in range(MANY)])
    assert (counts.sum(axis=1, keepdims=True) == totals).all()
    assert (np.diff(counts, axis=0) >= 0).all()

    def furthest(shares: np.ndarray) -> float:
        """Of a count from share x index."""
        return float(np.abs(counts * shares.sum() - totals * shares).max() / shares.sum())

    assert furthest(quotas.units) < 1
    is_exact = sum(units) == 10_000
    assert furthest(np.array(units)) < (1 if is_exact else 1 + MANY * BLOCK / SHARE_UNITS)


UNEVEN = tuple(1 / number for number in range(1, 51))
"""No simple fractions; the smallest share is above 1/1024."""
SMALL = (*(number / 1e4 for number in range(1, 50)), 1.3)
"""Shares from 4e-5 up."""


@pytest.mark.parametrize("given", [UNEVEN, SMALL, (1e-4, 0.9999), (1.0,) * 99 + (200003.0,)])
def test_counts_of_any_border_need_no_long_table(given: tuple[float, ...]) -> None:
    """Whatever was asked for before."""
    far = Quotas(given)
    block = 10**6 - 7
    counts = [far.before(block + number).tolist() for number in range(3)]
    assert far.table_rows <= MAX_PERIOD
    near = Quotas(given)
    for number in range(2 * MAX_PERIOD):
        near.before(number)
    assert near.table_rows <= MAX_PERIOD
    assert [near.before(block + number).tolist() for number in range(3)] == counts
    share = Fraction(int(far.units[0]), int(far.units.sum()))
    assert abs(counts[0][0] - share * block * BLOCK) < 1
    assert far.table_rows == 0 or min(given) / sum(given) < 1 / BLOCK


def test_largest_remainders_would_let_a_small_share_fall() -> None:
    """Why quotas are not rounded border by border: what the other tests would find."""

    def largest_remainders(share: list[Fraction], total: int) -> list[int]:
        counts = [int(each * total) for each in share]
        rests = sorted(range(len(share)), key=lambda source: -(share[source] * total - counts[source]))
        for source in rests[: total - sum(counts)]:
            counts[source] += 1
        return counts

    units = (0.0001, 0.1208, 0.8791)
    assert largest_remainders(exact_shares(units), 72 * BLOCK)[0] == 8
    assert largest_remainders(exact_shares(units), 73 * BLOCK)[0] == 7
    quotas = Quotas(units)
    assert quotas.before(72)[0] <= quotas.before(73)[0]


@given(weights, st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_every_prefix_has_the_shares(given: tuple[float, ...], seed: int) -> None:
    schedule = MixtureSchedule([Stage(0, given)], seed)
    sources, numbers = schedule.samples(0, 4 * BLOCK)
    shares = np.array([float(share) for share in exact_shares(given)])
    for source, share in enumerate(shares):
        is_source = sources == source
        running = np.cumsum(is_source)
        # Inside a block a source may be ahead by what the other sources are behind: at most one sample each.
        limit = 2 + len(given) * (share + 1 / BLOCK)
        assert np.abs(running - share * np.arange(1, len(sources) + 1)).max() <= limit
        assert (numbers[is_source] == np.arange(is_source.sum())).all()  # in order, none left out


@given(few_weights, st.integers(0, 5000), st.integers(1, 300), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_any_position_gives_the_same_samples(given: tuple[float, ...], first: int, count: int, seed: int) -> None:
    whole = MixtureSchedule([Stage(0, given)], seed).samples(0, first + count)
    part = MixtureSchedule([Stage(0, given)], seed).samples(first, count)
    for all_of_them, some in zip(whole, part, strict=True):
        assert (all_of_them[first:] == some).all()
    counts = MixtureSchedule([Stage(0, given)], seed).counts(first)
    assert (counts == np.bincount(whole[0][:first], minlength=len(given))).all()


stage_lists = st.integers(2, 5).flatmap(
    lambda sources: st.tuples(
        st.lists(st.integers(1, 1000), min_size=sources, max_size=sources),
        st.lists(
            st.tuples(st.integers(1, 3000), st.lists(st.integers(0, 1000), min_size=sources, max_size=sources)),
            max_size=3,
        ),
        st.lists(st.one_of(st.none(), st.integers(1, 1500)), min_size=sources, max_size=sources),
    )
)


@given(stage_lists, st.integers(0, 2**31))
@settings(max_examples=120, deadline=None)
def test_stages_and_caps(drawn: tuple[list[int], list[tuple[int, list[int]]], list[int | None]], seed: int) -> None:
    first, later, caps = drawn
    stages = [Stage(0, tuple(map(float, first)))]
    for gap, wanted in later:
        if any(wanted):
            stages.append(Stage(stages[-1].first_sample + gap, tuple(map(float, wanted))))
    schedule = MixtureSchedule(stages, seed, caps)
    end = schedule.last_sample(8000)
    sources, numbers = schedule.samples(0, end) if end else (np.array([], int), np.array([], int))
    used = np.bincount(sources, minlength=len(first))
    for source, cap in enumerate(caps):
        assert cap is None or used[source] <= cap
        assert (numbers[sources == source] == np.arange(used[source])).all()
    if end < 8000:  # nothing that the stage wants is left
        weights = [stage for stage in stages if stage.first_sample <= end][-1].weights
        for source, cap in enumerate(caps):
            assert not weights[source] or used[source] == cap
    # Every border and every split into parts gives the same.
    for middle in (end // 3, end // 2, max(0, end - 7)):
        again = MixtureSchedule(stages, seed, caps)
        if middle < end:
            assert (again.samples(middle, end - middle)[0] == sources[middle:]).all()
        assert (again.counts(middle) == np.bincount(sources[:middle], minlength=len(first))).all()
    for stage in stages[1:]:  # a source with weight 0 gives nothing from there on
        following = [each.first_sample for each in stages if each.first_sample > stage.first_sample]
        part = sources[stage.first_sample : min(following, default=end)]
        assert not {source for source, weight in enumerate(stage.weights) if not weight} & set(part.tolist())


@given(few_weights, few_weights, st.integers(1, 4000), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_an_appended_stage_leaves_earlier_samples_as_they_were(
    given: tuple[float, ...], other: tuple[float, ...], border: int, seed: int
) -> None:
    size = min(len(given), len(other))
    before = MixtureSchedule([Stage(0, given[:size])], seed).samples(0, border)
    stages = [Stage(0, given[:size]), Stage(border, other[:size])]
    after = MixtureSchedule(stages, seed).samples(0, border + 100)
    for old, new in zip(before, after, strict=True):
        assert (new[:border] == old).all()


def test_share_of_an_exhausted_source_goes_to_the_others_in_proportion() -> None:
    schedule = MixtureSchedule([Stage(0, (0.5, 0.3, 0.2))], 1, [1000, None, None])
    end = schedule.exhausted(10**6)[0]
    assert schedule.counts(end)[0] == 1000
    rest = schedule.counts(end + 100 * BLOCK) - schedule.counts(end)
    assert rest[0] == 0
    assert abs(rest[1] - 0.6 * 100 * BLOCK) < 1


def test_samples_end_when_every_source_has_reached_its_cap() -> None:
    schedule = MixtureSchedule([Stage(0, (1.0, 1.0))], 1, [10, 20])
    assert schedule.last_sample(1000) == 30
    assert len(schedule.samples(0, 30)[0]) == 30
    with pytest.raises(IndexError):
        schedule.samples(30, 1)


def test_far_positions_need_no_work() -> None:
    schedule = MixtureSchedule([Stage(0, (0.7, 0.2, 0.1))], 1)
    assert schedule.counts(10 * BLOCK * 10**9).tolist() == [share * BLOCK * 10**9 for share in (7, 2, 1)]


def test_order_depends_on_the_seed_and_differs_between_blocks() -> None:
    first = MixtureSchedule([Stage(0, (0.5, 0.5))], 1).samples(0, 2 * BLOCK)[0]
    other = MixtureSchedule([Stage(0, (0.5, 0.5))], 2).samples(0, 2 * BLOCK)[0]
    assert (first != other).any()
    assert (first[:BLOCK] != first[BLOCK:]).any()


def test_schedule_is_the_same_on_every_machine() -> None:
    """Changing the schedule would change what resumed runs read."""
    sources, numbers = MixtureSchedule([Stage(0, (0.7, 0.2, 0.1))], 42).samples(1000, 24)
    assert "".join(map(str, sources.tolist())) == "010202010001000012000010"
    assert numbers[:4].tolist() == [701, 200, 702, 99]


@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=50))
@settings(max_examples=100, deadline=None)
def test_shares_are_exact_to_a_millionth(given: list[float]) -> None:
    units = shares_in_units(given)
    assert sum(units) <= SHARE_UNITS
    assert min(units) >= 1
    for unit, weight in zip(units, given, strict=True):
        assert abs(unit / sum(units) - weight / sum(given)) <= len(given) / SHARE_UNITS
