"""metrics.jsonl as columns, read once and then from the byte where the last read ended."""

import math
import os
import threading
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import repeat
from operator import contains, gt, itemgetter
from pathlib import Path
from typing import Any

from llmtrain.core.files import open_text
from llmtrain.page.downsample import min_max, shortened, smooth, smoothing_weight
from llmtrain.runs import sources
from llmtrain.runs.metrics import parse_rows

Row = dict[str, Any]
TRAIN = (
    "train/loss",
    "train/lr",
    "train/grad_norm",
    "train/tokens_per_second",
    "train/mfu",
    "train/peak_memory_bytes",
    "train/accuracy",
    "train/margin",
    "train/logps_chosen",
    "train/logps_rejected",
    "train/rewards_chosen",
    "train/rewards_rejected",
    "train/kl",
)
EVAL = (
    "val/loss",
    "val/perplexity",
    "val/bits_per_byte",
    "val/accuracy",
    "val/margin",
    "val/logps_chosen",
    "val/logps_rejected",
    "val/rewards_chosen",
    "val/rewards_rejected",
    "val/kl",
)
AXES = ("step", "tokens", "time")
_KEYS = {"tokens": "train/tokens"}
_BLOCK_BYTES = 1 << 20
_MARK_BYTES = 256
_MAX_POSITION = 40
"""Characters of a position: it comes from a client."""
_NUMBER = (int, float)
_MAX_SOURCES = 32


class Table:
    """Rows that have a loss of one kind, as columns of equal length; NaN where a row has no number."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.columns: dict[str, array[float]] = {name: array("d") for name in (*AXES, *names)}

    def __len__(self) -> int:
        return len(self.columns["step"])

    def extend(self, rows: list[dict[str, Any]], tokens: float) -> None:
        """`tokens`: the number before the first row, for rows that have none, as evaluations do."""
        begin = max(0, len(self) - 1)
        for name, column in self.columns.items():
            key = _KEYS.get(name, name)
            before = len(column)
            if not _have(rows, key, any):
                column.extend(repeat(math.nan, len(rows)))
            else:
                try:  # without a loop in Python: a long run has a million values
                    column.extend(map(itemgetter(key), rows))
                except (TypeError, OverflowError, KeyError):  # null, not a number, or only in some rows
                    del column[before:]
                    column.extend([_number(row.get(key)) for row in rows])
            if name == "tokens":
                _fill(column, before, tokens)
        steps = self.columns["step"]
        if any(map(gt, steps[begin:], steps[begin + 1 :])):  # a damaged file: two processes may have written it
            order = sorted(range(len(steps)), key=steps.__getitem__)
            self.columns = {name: array("d", map(column.__getitem__, order)) for name, column in self.columns.items()}

    def slice(self, begin: int) -> dict[str, list[float | int | None]]:
        """All columns from a row on, for JSON."""
        return {name: _for_json(name, column[begin:]) for name, column in self.columns.items()}


class MetricsSeries:
    """The rows of one metrics.jsonl. `refresh` reads what was appended; a run that resumed has replaced the file, which
    is noticed by the bytes before the last position."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()  # readers of a request, and the next refresh
        self.reset()

    @classmethod
    def read(cls, path: Path) -> "MetricsSeries":
        """All rows; none if there is no file, or it is not readable."""
        series = cls(path)
        try:
            series.refresh()
        except OSError:
            series.reset()
        return series

    def reset(self) -> None:
        self.offset = 0
        self._mark = 0
        self.train = Table(TRAIN)
        self.eval = Table(EVAL)
        self.sources: dict[str, Table] = {}
        self._tokens = math.nan

    @property
    def position(self) -> str:
        """Where reading continues, and a checksum of the bytes before: `1840-5f3a`. A client sends it back."""
        return position_text(self.offset, self._mark)

    def refresh(self) -> bool:
        """Read what is new. True: the file was replaced, so the rows before are no longer valid."""
        with self._lock, open_text(self.path) as file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            is_replaced = size < self.offset or _checksum(descriptor, self.offset) != self._mark
            if is_replaced:
                self.reset()
            while self.offset < size:
                block = os.pread(descriptor, _BLOCK_BYTES, self.offset)
                end = block.rfind(b"\n") + 1
                if not end:  # an incomplete line, or one that is not ours
                    if len(block) < _BLOCK_BYTES:
                        break
                    end = len(block)
                self._add(parse_rows(block[:end]))
                self.offset += end
            self._mark = _checksum(descriptor, self.offset)
        return is_replaced

    def _add(self, rows: list[dict[str, Any]]) -> None:
        before = self._tokens
        train = rows
        if not _have(rows, "train/loss", all):
            train = [row for row in rows if "train/loss" in row]
        self.train.extend(train, before)
        if train:
            self._tokens = self.train.columns["tokens"][-1]
        if not _have(rows, "val/loss", any):
            return
        tokens = before
        evals = []
        for row in rows:
            own = row.get("train/tokens")
            if isinstance(own, _NUMBER):
                tokens = own
            if "val/loss" in row:
                evals.append({**row, "train/tokens": tokens})
        self.eval.extend(evals, before)
        for name in dict.fromkeys(name for row in evals for name in row if name.startswith(sources.LOSS)):
            if name in self.sources or len(self.sources) < _MAX_SOURCES:
                table = self.sources.setdefault(name, Table((name,)))
                table.extend([row for row in evals if name in row], before)

    def curve(
        self,
        name: str,
        axis: str,
        columns: int,
        start: float | None = None,
        end: float | None = None,
        weight: float = 0.0,
        is_exact: bool = False,
    ) -> dict[str, Any]:
        """A curve for a chart of this many pixel columns. `weight`: also its moving average, with at most this, or with
        exactly this."""
        with self._lock:
            if not is_exact:
                weight = smoothing_weight(weight, len(self._table(name)))
            return self._curve(name, axis, columns, start, end, weight)

    def source_curves(
        self, axis: str, columns: int, start: float | None = None, end: float | None = None
    ) -> dict[str, dict[str, Any]]:
        """The validation loss of each source of a mixture, as `curve` has it."""
        with self._lock:
            return {name: self._curve(name, axis, columns, start, end, 0.0) for name in self.sources}

    def _table(self, name: str) -> Table:
        if name in self.sources:
            return self.sources[name]
        return self.eval if name in EVAL else self.train

    def _curve(
        self, name: str, axis: str, columns: int, start: float | None, end: float | None, weight: float
    ) -> dict[str, Any]:
        table = self._table(name)
        xs = table.columns[axis]
        ys = table.columns[name]
        if axis != "step":
            xs = rising(xs, self.time_base if axis == "time" else 0.0)
        x, y = min_max(xs, ys, columns, start, end)
        curve: dict[str, Any] = {"x": rounded(axis, x), "y": shortened(y), "total": _count(xs, start, end)}
        if weight and len(ys):
            x, y = min_max(xs, smooth(ys, weight), columns // 2, start, end)
            curve["smooth"] = {"x": rounded(axis, x), "y": shortened(y), "weight": weight}
        return curve

    @property
    def time_base(self) -> float:
        """Time of the first row, where the time axis begins."""
        first = []
        for table in (self.train, self.eval):
            times = table.columns["time"]
            if times and math.isfinite(times[0]):
                first.append(times[0])
        return min(first, default=0.0)

    def axis_at(self, step: int, axis: str) -> float | None:
        """Where a step is on an axis; None before the first row."""
        steps = self.train.columns["step"]
        if axis == "step":
            return step
        if not steps:
            return None
        index = min(bisect_left(steps, step), len(steps) - 1)
        value = self.train.columns[axis][index]
        if axis == "time":
            value -= self.time_base
        return round(value, 1) if math.isfinite(value) else None


class SeriesCache:
    """The series of the runs that were looked at last, up to a number of rows in all."""

    def __init__(self, max_rows: int = 600_000) -> None:
        self._max_rows = max_rows
        self._series: OrderedDict[Path, MetricsSeries] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, path: Path) -> MetricsSeries | None:
        """The series as it was read last; None if it was not read, or is no longer kept."""
        with self._lock:
            return self._series.get(path)

    def get(self, path: Path) -> MetricsSeries:
        """Refreshed. OSError: there is no such file."""
        with self._lock:
            series = self._series.pop(path, None) or MetricsSeries(path)
            self._series[path] = series
        series.refresh()
        with self._lock:
            while len(self._series) > 1 and sum(len(each.train) for each in self._series.values()) > self._max_rows:
                self._series.popitem(last=False)
        return series


def rounded(name: str, values: list[float]) -> list[float | int]:
    """Times keep a tenth of a second, other values their significant digits."""
    return [round(value, 1) for value in values] if name == "time" else shortened(values)


def read_rows(path: Path, position: str, max_bytes: int) -> tuple[list[dict[str, Any]], str] | None:
    """The rows after a position, and the next one. None: the file was replaced, or has more new bytes than that."""
    offset, mark = parse_position(position)
    with open_text(path) as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        if size < offset or size - offset > max_bytes or _checksum(descriptor, offset) != mark:
            return None
        block = os.pread(descriptor, size - offset, offset)
        end = block.rfind(b"\n") + 1
        if not end:
            return [], position
        return parse_rows(block[:end]), position_text(offset + end, _checksum(descriptor, offset + end))


def end_position(path: Path) -> str:
    """The position after the last complete row that is in the file now."""
    try:
        with open_text(path) as file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            begin = max(0, size - _BLOCK_BYTES)
            end = begin + os.pread(descriptor, size - begin, begin).rfind(b"\n") + 1
            return position_text(end, _checksum(descriptor, end))
    except OSError:
        return "0-0"


def position_text(offset: int, mark: int) -> str:
    return f"{offset}-{mark:x}"


def parse_position(text: str) -> tuple[int, int]:
    """(offset, checksum); the beginning of the file if the text is not a position."""
    offset, _, mark = text.partition("-")
    if not offset.isdecimal() or len(text) >= _MAX_POSITION:
        return 0, 0
    try:
        return int(offset), int(mark, 16)
    except ValueError:
        return 0, 0


def table_of_rows(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """New rows as columns, in the form of `Table.slice`. An evaluation has the tokens of the row before it, or
    null."""
    series = MetricsSeries(Path())
    series._add(rows)
    by_source = {name: table.slice(0) for name, table in series.sources.items()}
    return {"train": series.train.slice(0), "eval": series.eval.slice(0), "sources": by_source}


def _have(rows: list[Row], key: str, which: Callable[[Iterable[bool]], bool]) -> bool:
    """Whether any row, or all of them, have a key."""
    return which(map(contains, rows, repeat(key)))


def _checksum(descriptor: int, offset: int) -> int:
    """Checksum of the last bytes before an offset, which differ in a file that was replaced, even by a longer one."""
    if not offset:
        return 0
    begin = max(0, offset - _MARK_BYTES)
    return zlib.crc32(os.pread(descriptor, offset - begin, begin))


def _number(value: Any) -> float:
    """NaN for what is not a number."""
    try:
        return float(value) if isinstance(value, _NUMBER) else math.nan
    except OverflowError:
        return math.nan


def _fill(column: "array[float]", begin: int, value: float) -> None:
    """Replace NaN by the value before it."""
    if math.isfinite(sum(column[begin:])):
        return
    for index in range(begin, len(column)):
        if math.isfinite(column[index]):
            value = column[index]
        else:
            column[index] = value


def rising(xs: "array[float]", base: float) -> "array[float]":
    """Relative to `base`. Clocks may be set back between two starts of a run; an x axis may not."""
    highest = 0.0
    found = array("d")
    for value in xs:
        if highest < value - base < math.inf:  # false for NaN too
            highest = value - base
        found.append(highest)
    return found


def _count(xs: "array[float]", start: float | None, end: float | None) -> int:
    low = 0 if start is None else bisect_left(xs, start)
    high = len(xs) if end is None else bisect_right(xs, end)
    return max(0, high - low)


def _for_json(name: str, values: Iterable[float]) -> list[float | int | None]:
    return [rounded(name, [value])[0] if math.isfinite(value) else None for value in values]
