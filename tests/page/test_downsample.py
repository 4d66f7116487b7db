"""Downsampling keeps the minimum and maximum of each pixel column; metrics are read by increments."""

import json
import math
import random
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo_runs import make_run, train_row, write_rows
from llmtrain.page.downsample import min_max, shortened, smooth, smoothing_weight
from llmtrain.page.series import MetricsSeries, SeriesCache, end_position, parse_rows, read_rows


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300),
    st.integers(1, 40),
)
def test_min_max_keeps_extremes_and_ends(values: list[float], columns: int) -> None:
    xs, ys = array("d", range(len(values))), array("d", values)
    x, y = min_max(xs, ys, columns)
    assert x == sorted(x)
    assert len(x) <= 2 * columns + 4
    assert (min(y), max(y)) == (min(values), max(values))
    assert (x[0], x[-1]) == (0, len(values) - 1)
    assert all(ys[int(at)] == value for at, value in zip(x, y, strict=True))


def test_min_max_keeps_single_spike_of_many_rows() -> None:
    ys = array("d", [1.0] * 100_000)
    ys[54_321] = 9.0
    x, y = min_max(array("d", range(100_000)), ys, 600)
    assert 54_321 in x
    assert max(y) == 9.0
    assert len(x) <= 1204


def test_min_max_omits_values_that_are_not_finite() -> None:
    ys = array("d", [1.0, math.nan, 3.0, math.inf] * 100)
    _, y = min_max(array("d", range(400)), ys, 5)
    assert set(y) == {1.0, 3.0}
    assert min_max(array("d", range(4)), array("d", [math.nan] * 4), 1) == ([], [])


def test_min_max_of_range_has_more_detail() -> None:
    rng = random.Random(0)
    xs, ys = array("d", range(10_000)), array("d", [rng.random() for _ in range(10_000)])
    x, _ = min_max(xs, ys, 100, 2000, 2100)
    assert x[0] <= 2000
    assert x[-1] >= 2100
    assert len(x) >= 101  # every row of the range


def test_smooth_is_the_average_and_passes_over_nan() -> None:
    assert smooth(array("d", [2.0, math.nan, 2.0]), 0.9)[2] == pytest.approx(2.0)
    values = [float(number % 7) for number in range(400)]
    smoothed = smooth(array("d", values), 0.9)
    for end in (1, 5, 400):
        weights = [0.9 ** (end - 1 - index) for index in range(end)]
        mean = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert smoothed[end - 1] == pytest.approx(mean)
    with_gaps = smooth(array("d", [math.nan, *values]), 0.9)
    assert math.isnan(with_gaps[0])
    assert with_gaps[1:] == smoothed


@pytest.mark.parametrize("count", [0, 1, 5, 12, 40, 60, 400, 20_000])
def test_smoothed_curve_ends_near_last_values_however_short(count: int) -> None:
    """Of few points, an average over ten of them would show a loss far from that of the run."""
    values = array("d", (10 - 9 * index / max(1, count - 1) for index in range(count)))
    weight = smoothing_weight(0.9, count)
    assert (weight == 0) == (count <= 40)
    assert weight == 0.9 or count < 400
    if count > 1:
        assert smooth(values, weight)[-1] < 1 + 9 * 0.03


def test_curve_has_moving_average_only_if_it_is_long_enough(tmp_path: Path) -> None:
    for count in (15, 100):
        run = make_run(tmp_path, f"run-{count}", steps=count, extras=False)
        series = MetricsSeries(run / "metrics.jsonl")
        series.refresh()
        curve = series.curve("train/loss", "step", 500, weight=0.99)
        assert ("smooth" in curve) == (count > 40)
    assert curve["smooth"]["weight"] == pytest.approx(0.6)


def test_shortened_keeps_integers() -> None:
    assert shortened([524288.0, 0.123456789, 3.0]) == [524288, 0.123457, 3]


def test_series_reads_only_what_was_appended(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one", steps=100, extras=False)
    series = MetricsSeries(run / "metrics.jsonl")
    assert series.refresh() is False
    before = series.position
    assert (len(series.train), len(series.eval)) == (100, 20)
    write_rows(run, 101, 110, 0.0, 0.5, 6e-4, 100)
    assert series.refresh() is False
    assert len(series.train) == 110
    found = read_rows(run / "metrics.jsonl", before, 1 << 20)
    assert found is not None
    rows, position = found
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(101, 111))
    assert position == series.position == end_position(run / "metrics.jsonl")


def test_series_notices_file_of_resumed_run(tmp_path: Path) -> None:
    """A resumed run replaces the file by a shorter one and appends: the size alone does not show it."""
    run = make_run(tmp_path, "one", steps=50, extras=False)
    path = run / "metrics.jsonl"
    series = MetricsSeries(path)
    series.refresh()
    position = series.position
    kept = "".join(path.read_text().splitlines(keepends=True)[:20])
    path.write_text(kept)
    write_rows(run, 21, 90, 5.0, 0.5, 1e-3, 100)
    assert read_rows(path, position, 1 << 20) is None
    assert series.refresh() is True
    assert max(series.train.columns["step"]) == 90


def test_rows_beyond_limit_are_read_again_as_curves(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one", steps=200, extras=False)
    assert read_rows(run / "metrics.jsonl", "0-0", 1000) is None
    assert read_rows(run / "metrics.jsonl", "nonsense", 1 << 20) is not None


@pytest.mark.parametrize(
    "line", ["not json", '{"step": "1"}', "[1]", '{"step": 2, "train/loss": "x", "time": []}', "", "[" * 100_000]
)
def test_series_survives_damaged_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    good = [json.dumps(train_row(step, 1.0, 1e-3, 10, random.Random(0))) for step in (1, 3)]
    path.write_text(f"{good[0]}\n{line}\n{good[1]}\n" + '{"step": 4, "train/l')
    series = MetricsSeries(path)
    series.refresh()
    assert {1.0, 3.0} <= set(series.train.columns["step"]) <= {1.0, 2.0, 3.0}
    assert {len(column) for column in series.train.columns.values()} == {len(series.train)}
    assert 4 not in series.train.columns["step"]


def test_parse_rows_of_huge_integers_keeps_columns_equal(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": %s, "time": 1}\n' % ("9" * 400))
    series = MetricsSeries(path)
    series.refresh()
    assert {len(column) for column in series.train.columns.values()} == {1}
    assert parse_rows(b"\n\n") == []


def test_axes_begin_at_zero_seconds_and_evaluations_have_tokens(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one", steps=100, extras=False)
    series = MetricsSeries(run / "metrics.jsonl")
    series.refresh()
    assert series.curve("train/loss", "time", 100)["x"][0] == 0
    tokens = series.curve("val/loss", "tokens", 100)["x"]
    assert tokens == [step * 524_288 for step in range(5, 101, 5)]


def test_losses_of_sources_are_curves(tmp_path: Path) -> None:
    """A source has values from the first evaluation that knows it, as after a resume with another mixture."""
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 5, "val/loss": 3.0}, {"step": 10, "val/loss": 2.0, "val/loss/web": 2.5}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    series = MetricsSeries(path)
    series.refresh()
    assert series.source_curves("step", 100) == {"val/loss/web": {"x": [10], "y": [2.5], "total": 1}}
    rows = [{"step": 15, "val/loss": 1.5, "val/loss/web": 1.0, "val/loss/books": 2.0}, {"step": 20, "val/loss": 1.0}]
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    series.refresh()
    curves = series.source_curves("step", 100)
    assert {name: (curve["x"], curve["y"]) for name, curve in curves.items()} == {
        "val/loss/web": ([10, 15], [2.5, 1.0]),
        "val/loss/books": ([15], [2.0]),
    }
    with path.open("a") as file:
        file.write(json.dumps({"step": 25, "val/loss": 1.0, **{f"val/loss/{n}": 1.0 for n in range(1000)}}) + "\n")
    series.refresh()
    assert len(series.source_curves("step", 100)) == 32, "a damaged file does not make any number of charts"


def test_cache_keeps_bounded_number_of_rows(tmp_path: Path) -> None:
    cache = SeriesCache(max_rows=150)
    paths = [make_run(tmp_path, f"run-{number}", steps=100, extras=False) / "metrics.jsonl" for number in range(3)]
    for path in paths:
        cache.get(path)
    assert [cache.find(path) is not None for path in paths] == [False, False, True]
