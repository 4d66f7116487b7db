"""Which rows of a store are trained on at a block_size, and how much of each."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmtrain.config.data import ExampleDataSection
from llmtrain.data.store.example_store import ExampleStore
from llmtrain.errors import DataError
from llmtrain.logs import warn_once

ROWS_AT_ONCE = 1 << 16
Indexes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Selection:
    """Rows of a store, with the number of positions (tokens but the last) that each takes."""

    rows: Indexes
    lengths: Indexes

    def __len__(self) -> int:
        return len(self.rows)


def select_examples(store: ExampleStore, config: ExampleDataSection, block_size: int, label: str) -> Selection:
    """Cut or leave out what is too long, and leave out what has no answer left after the cut. Says how many."""
    lengths = store.lengths - 1
    is_long = lengths > block_size
    if config.truncation == "error" and is_long.any():
        raise _too_long(store, block_size, label, lengths, is_long)
    kept = np.minimum(lengths, block_size)
    has_target = kept > 0 if config.train_on_prompt else _answers_in(store, kept) > 0
    is_left_out = is_long & (config.truncation == "skip")
    if config.truncation == "skip":
        _tell(is_left_out, f"longer than model.block_size {block_size} and left out", label)
    else:
        _tell(is_long & has_target, f"longer than model.block_size {block_size} and cut", label)
    _tell(~has_target & ~is_left_out, f"left out: nothing of the answer lies within block_size {block_size}", label)
    chosen = np.flatnonzero(has_target & ~is_left_out)
    if not len(chosen):
        raise DataError(
            f"None of the {store.example_count:,} {label} rows can be used at model.block_size {block_size}.",
            remedy="Raise model.block_size.",
        )
    return Selection(chosen, kept[chosen])


def _answers_in(store: ExampleStore, kept: Indexes) -> Indexes:
    """Targets of each row that are part of an answer."""
    counts = np.zeros(len(kept), dtype=np.int64)
    for first in range(0, len(kept), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        starts, ends = store.spans[part, 0], store.spans[part, 1]
        before = np.concatenate([[0], np.cumsum(store.answers[starts[0] : ends[-1]], dtype=np.int64)])
        first_target, behind = np.minimum(starts + 1, ends), starts + 1 + kept[part]
        counts[part] = before[behind - starts[0]] - before[first_target - starts[0]]
    return counts


def _too_long(store: ExampleStore, block_size: int, label: str, lengths: Indexes, is_long: Flags) -> DataError:
    row, others = int(np.flatnonzero(is_long)[0]), int(is_long.sum()) - 1
    file, line = store.place(row)
    return DataError(
        f"{file}, line {line}: the row has {lengths[row]:,} tokens, more than model.block_size {block_size}"
        + (f"; so have {others:,} other {label} rows." if others else "."),
        remedy=f"Raise model.block_size (the longest needs {lengths.max()}), or set data.truncation to right or skip.",
    )


def _tell(concerned: Flags, what: str, label: str) -> None:
    count = int(concerned.sum())
    if count:
        warn_once("DATA", f"{count:,} of {len(concerned):,} {label} rows {'is' if count == 1 else 'are'} {what}")
