"""Fewer points for a curve without losing its peaks: the minimum and the maximum of each pixel column."""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, islice

Points = tuple[list[float], list[float]]
DIGITS = 6
"""Significant digits of a value that is sent."""
SMOOTHING = 0.9
"""Default weight of the moving average."""
WINDOWS_PER_CURVE = 40
"""A moving average over more than this part of a curve would show its past."""


def min_max(
    xs: "array[float]", ys: "array[float]", columns: int, start: float | None = None, end: float | None = None
) -> Points:
    """The points between `start` and `end`: all of them if there are at most two per column, else the lowest and the
    highest of each column, in their order. `xs` is sorted. Values that are not finite are omitted; the first and the
    last finite value are always kept."""
    low = 0 if start is None else max(0, bisect_left(xs, start) - 1)  # one more, so that the line reaches the edge
    high = len(xs) if end is None else min(len(xs), bisect_right(xs, end) + 1)
    if high - low <= 2 * columns:
        kept: list[int] = [index for index in range(low, high) if math.isfinite(ys[index])]
    else:
        kept = _extremes(xs, ys, columns, low, high)
    return [xs[index] for index in kept], [ys[index] for index in kept]


def _extremes(xs: "array[float]", ys: "array[float]", columns: int, low: int, high: int) -> list[int]:
    first_x = xs[low]
    width = (xs[high - 1] - first_x) / columns
    kept: list[int] = []
    begin = low
    for column in range(1, columns + 1):
        end = high if column == columns else bisect_left(xs, first_x + column * width, begin, high)
        if end == begin:
            continue
        kept += _extremes_of(ys, begin, end, is_edge=begin == low or end == high)
        begin = end
    return kept


def _extremes_of(ys: "array[float]", begin: int, end: int, is_edge: bool) -> list[int]:
    values = ys[begin:end]
    if math.isfinite(sum(values)):  # the usual case, without a loop in Python
        first = begin
        last = end - 1
        found = {begin + values.index(min(values)), begin + values.index(max(values))}
    else:
        finite = [index for index in range(begin, end) if math.isfinite(ys[index])]
        if not finite:
            return []
        first = finite[0]
        last = finite[-1]
        found = {min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)}
    if is_edge:
        found |= {first, last}
    return sorted(found)


def smooth(ys: "array[float]", weight: float) -> "array[float]":
    """Exponential moving average, corrected for its start; values that are not finite are passed over."""
    is_finite = math.isfinite(sum(ys))
    values = ys if is_finite else array("d", (value for value in ys if math.isfinite(value)))
    totals = accumulate(values, lambda total, value: weight * total + (1 - weight) * value, initial=0.0)
    averages = array("d", islice(totals, 1, None))
    # The average starts at 0 instead of at the first value; after n values that has a weight of weight^n.
    norm = 1.0
    for index in range(len(averages)):
        norm *= weight
        if norm < 1e-12:
            break
        averages[index] /= 1 - norm
    if is_finite:
        return averages
    rest = iter(averages)
    return array("d", (next(rest) if math.isfinite(value) else math.nan for value in ys))


def smoothing_weight(weight: float, count: int) -> float:
    """The weight for a curve of `count` points: its window, 1 / (1 - weight) points, is at most a part of the curve. 0
    for a short curve, which is its own best average."""
    if not count:
        return 0.0
    return max(0.0, min(weight, 1 - WINDOWS_PER_CURVE / count))


def shortened(values: Sequence[float]) -> list[float | int]:
    """The values with DIGITS significant digits, and integers as such: a third of the bytes in JSON."""
    return [int(value) if value == int(value) and abs(value) < 1e15 else _short(value) for value in values]


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
