"""Position -> source: which source a sample of a mixture comes from, and its number among the samples of that source.

Both are a pure function of (seed, sample index). Samples come in blocks of 1,024, and every source has a quota of each
block. At the borders of blocks a source has been used within one sample of share x index, and its count never falls.
Inside a block the samples of each source are spread evenly, in an order drawn by a keyed hash. So any prefix has the
shares, also within a batch, and nothing has to be saved.

A segment is a range of samples with constant shares. It ends where a stage begins, or with the sample at which a source
reaches its cap. What came before a border does not depend on what comes after: a stage can be appended to a run.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

import numpy as np
import numpy.typing as npt

from llmtrain.core.seeds import derive_seed
from llmtrain.data.sampler import mix

Counts = npt.NDArray[np.int64]
"""One number per source."""
BLOCK = 1024
SHARE_UNITS = 1024 * BLOCK
"""Shares that are not fractions with a denominator up to this one are rounded to it."""
MAX_PERIOD = SHARE_UNITS // BLOCK
"""Most rows of a table of counts: 30 ms of work, once, and 400 KB for 50 sources."""
KEPT_BLOCKS = 4


@dataclass(frozen=True)
class Stage:
    """Weights from a sample on."""

    first_sample: int
    weights: tuple[float, ...]


class MixtureSchedule:
    def __init__(self, stages: Sequence[Stage], seed: int, caps: Sequence[int | None] | None = None) -> None:
        """`stages`: in order, the first from sample 0. `caps`: most samples of each source; None: any number."""
        assert stages[0].first_sample == 0
        self._stages = list(stages)
        self._seed = seed
        self._caps = list(caps or [None] * len(stages[0].weights))
        self._end: int | None = None  # where no source has samples left
        none = np.zeros(len(self._caps), np.int64)
        self._segments = [Segment(0, none, Quotas(stages[0].weights), derive_seed(seed, "mixture", 0))]

    def counts(self, index: int) -> Counts:
        """How many of the samples before this index come from each source."""
        segment = self._segment(max(0, index - 1))
        return segment.before + segment.count(index - segment.start)

    def samples(self, first: int, count: int) -> tuple[Counts, Counts]:
        """The source of `count` samples from `first` on, and the number of each among the samples of its source."""
        sources = []
        numbers = []
        self._extend(first + count - 1)  # all borders in this range
        while count:
            segment = self._segment(first)
            taken = min(count, self._end_of(segment, first + count) - first)
            part = segment.samples(first - segment.start, taken)
            sources.append(part[0])
            numbers.append(part[1])
            first += taken
            count -= taken
        return np.concatenate(sources), np.concatenate(numbers)

    def last_sample(self, limit: int) -> int:
        """The number of samples until all sources have reached their caps, at most `limit`."""
        if limit:
            self._extend(limit - 1)
        return limit if self._end is None else min(limit, self._end)

    def exhausted(self, limit: int) -> dict[int, int]:
        """Sources that reach their cap among the first `limit` samples -> number of samples until then."""
        if limit:
            self._extend(limit - 1)
        found: dict[int, int] = {}
        borders = [(segment.start, segment.before) for segment in self._segments[1:]]
        for start, before in borders:
            for source, cap in enumerate(self._caps):
                if cap is not None and before[source] >= cap and start <= limit:
                    found.setdefault(source, start)
        return found

    def _segment(self, index: int) -> "Segment":
        self._extend(index)
        if self._end is not None and index >= self._end:
            raise IndexError(f"the sources have {self._end} samples, and sample {index} is asked for")
        return self._segments[bisect_right([segment.start for segment in self._segments], index) - 1]

    def _end_of(self, segment: "Segment", limit: int) -> int:
        """The end of a segment, at most `limit`."""
        following = [each.start for each in self._segments if each.start > segment.start]
        if self._end is not None:
            following.append(self._end)
        known = min(following, default=None)
        return limit if known is None else min(limit, known)

    def _extend(self, index: int) -> None:
        """Find the segments up to the one of this sample."""
        while self._end is None:
            last = self._segments[-1]
            start = self._next_start(last, index)
            if start is None:
                return
            before = last.before + last.count(start - last.start)
            weights = self._weights(start, before)
            if not any(weights):
                self._end = start
                return
            key = derive_seed(self._seed, "mixture", start)
            self._segments.append(Segment(start, before, Quotas(weights), key))

    def _next_start(self, last: "Segment", index: int) -> int | None:
        """Where the segment after the last one starts, if that is at most `index` + 1: after its last sample."""
        limit = index + 1
        stage = min((each.first_sample for each in self._stages if each.first_sample > last.start), default=None)
        if stage is not None:
            limit = min(limit, stage)
        left = [None if cap is None else cap - int(used) for cap, used in zip(self._caps, last.before, strict=True)]
        offset = last.exhausted(left, limit - last.start)
        if offset is not None:
            return last.start + offset
        return stage if stage is not None and stage <= index else None

    def _weights(self, index: int, before: Counts) -> tuple[float, ...]:
        """The weights of a sample; 0 for sources that have reached their cap."""
        stage = [each for each in self._stages if each.first_sample <= index][-1]
        weights = []
        for weight, cap, used in zip(stage.weights, self._caps, before, strict=True):
            weights.append(0.0 if cap is not None and used >= cap else weight)
        return tuple(weights)


class Segment:
    """Samples with constant shares. Offsets count from its first sample."""

    def __init__(self, start: int, before: Counts, quotas: "Quotas", key: int) -> None:
        self.start = start
        self.before = before
        """Samples of each source before the segment."""
        self._quotas = quotas
        self._key = key
        self._blocks: dict[int, tuple[Counts, Counts]] = {}  # the last ones: a cache

    def count(self, offset: int) -> Counts:
        """Samples of each source before an offset."""
        block, rest = divmod(offset, BLOCK)
        counts = self._quotas.before(block)
        if rest:
            counts = counts + np.bincount(self._block(block)[0][:rest], minlength=len(counts))
        return counts

    def samples(self, offset: int, count: int) -> tuple[Counts, Counts]:
        sources = []
        numbers = []
        for block in range(offset // BLOCK, (offset + count - 1) // BLOCK + 1):
            first = max(0, offset - block * BLOCK)
            end = min(BLOCK, offset + count - block * BLOCK)
            in_block = self._block(block)
            sources.append(in_block[0][first:end])
            numbers.append(in_block[1][first:end])
        in_order = np.concatenate(sources)
        return in_order, np.concatenate(numbers) + self.before[in_order]

    def exhausted(self, left: Sequence[int | None], limit: int) -> int | None:
        """The offset after the first sample with which a source has none left, if it is at most `limit`."""
        ends = []
        for source, count in enumerate(left):
            if count is None or not self._quotas.units[source]:
                continue
            block = self._quotas.earliest_block(source, count)
            while block * BLOCK < limit and self._quotas.before(block + 1)[source] < count:
                block += 1
            if block * BLOCK >= limit:
                continue
            missing = count - int(self._quotas.before(block)[source])
            positions = np.flatnonzero(self._block(block)[0] == source)
            ends.append(block * BLOCK + int(positions[missing - 1]) + 1)
        end = min(ends, default=None)
        return end if end is not None and end <= limit else None

    def _block(self, number: int) -> tuple[Counts, Counts]:
        """The sources of a block in order, and the number of each sample in its source, counted in the segment."""
        if number not in self._blocks:
            if len(self._blocks) == KEPT_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[number] = self._ordered(number)
        return self._blocks[number]

    def _ordered(self, number: int) -> tuple[Counts, Counts]:
        before = self._quotas.before(number)
        quotas = self._quotas.before(number + 1) - before
        sources = np.repeat(np.arange(len(quotas)), quotas)
        ranks = np.arange(BLOCK) - np.repeat(np.cumsum(quotas) - quotas, quotas)  # in the block, of its source
        seeds = np.arange(BLOCK, dtype=np.uint64) + np.uint64(derive_seed(self._key, number))
        jitter = (mix(mix(seeds)) >> np.uint64(11)) / 2.0**53  # in [0, 1)
        # The samples of a source divide the block into equal parts, with one sample somewhere in each.
        order = np.argsort((ranks + jitter) / quotas[sources], kind="stable")
        return sources[order], (before[sources] + ranks)[order]


class Quotas:
    """How many samples of each source come before each border of blocks.

    At the border of N samples a source with share w has floor(w N) or ceil(w N), and no fewer than at the border
    before. Those sources are rounded up whose next sample is due first. A source with a share of at least 1/1024 is
    due in each block, so its count cannot fall, and if all are like that the counts of a border follow from N alone.
    With a smaller share they could fall, so each border also depends on the one before: earliest deadline first finds a
    solution if there is one, and there is one because exact shares are. Counts repeat after a number of blocks, which
    is at most MAX_PERIOD then, so a table of them is small.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        units = shares_in_units(weights)
        self.units = np.array(units, dtype=np.int64)
        self._total = sum(units)
        self._period = _period(self._total)
        self._per_period = self.units * (self._period * BLOCK // self._total)
        self._none = np.zeros(len(units), np.int64)
        self._table = [self._none] if _has_small_share(units) else None

    def before(self, block: int) -> Counts:
        """Samples of each source before a block."""
        periods, rest = divmod(block, self._period)
        earlier: Counts = periods * self._per_period
        if self._table is None:
            return earlier + self._at_border(rest, self._none)
        while len(self._table) <= rest:
            self._table.append(self._at_border(len(self._table), self._table[-1]))
        return earlier + self._table[rest]

    @property
    def table_rows(self) -> int:
        """Rows of the table so far; 0 if there is none."""
        return 0 if self._table is None else len(self._table)

    def earliest_block(self, source: int, count: int) -> int:
        """A block before which the source has had fewer samples than `count`."""
        return (count - 1) * self._total // (int(self.units[source]) * BLOCK)

    def _at_border(self, block: int, least: Counts) -> Counts:
        """Samples of each source before a block of the first period, no fewer than `least`."""
        floors, rests = np.divmod(self.units * (block * BLOCK), self._total)
        row = np.maximum(least, floors)
        missing = block * BLOCK - int(row.sum())
        if missing:
            can_round_up = (row == floors) & (rests > 0)
            due = np.full(len(row), np.inf)
            due[can_round_up] = (self._total - rests[can_round_up]) / self.units[can_round_up]
            row[np.argsort(due, kind="stable")[:missing]] += 1
        return row


def _period(total: int) -> int:
    """After this many blocks counts repeat, if shares are multiples of 1 / total."""
    return total // gcd(total, BLOCK)


def _has_small_share(units: Sequence[int]) -> bool:
    """Whether some source has less than one sample per block."""
    total = sum(units)
    return any(0 < unit * BLOCK < total for unit in units)


def shares_in_units(weights: Sequence[float]) -> list[int]:
    """Integers with exactly the proportions of the weights, as they are written in decimal. They are rounded to
    SHARE_UNITS in all if no small integers have them, or if a small share would need a long table of counts."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    denominator = lcm(*(share.denominator for share in shares))
    if denominator <= SHARE_UNITS:
        units = [int(share * denominator) for share in shares]
        if _period(denominator) <= MAX_PERIOD or not _has_small_share(units):
            return units
    units = [max(1, int(share * SHARE_UNITS)) if share else 0 for share in shares]
    rests = [share * SHARE_UNITS - unit for share, unit in zip(shares, units, strict=True)]
    by_rest = sorted(range(len(units)), key=lambda source: -rests[source])
    missing = SHARE_UNITS - sum(units)
    for source in by_rest[: max(0, missing)]:
        units[source] += 1
    if missing < 0:  # tiny shares were raised to one unit
        units[units.index(max(units))] += missing
    return units
