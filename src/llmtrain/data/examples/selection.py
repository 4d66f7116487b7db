"""Which examples of a store are used at a given block_size, and how many tokens of each."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmtrain.config.data import ExampleBatchesSection
from llmtrain.core.logs import warn_once
from llmtrain.data.batches import Indexes
from llmtrain.data.store.example_store import ExampleStore
from llmtrain.errors import DataError

EXAMPLES_AT_ONCE = 1 << 16
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Selection:
    """Indexes of examples in a store, and the number of input positions (tokens without the last) of each."""

    examples: Indexes
    lengths: Indexes

    def __len__(self) -> int:
        return len(self.examples)


def select_examples(store: ExampleStore, config: ExampleBatchesSection, block_size: int, label: str) -> Selection:
    """Truncate or drop long examples, drop those without an answer in the remaining tokens, and log how many."""
    lengths = store.lengths - 1
    is_long = lengths > block_size
    if config.truncation == "error" and is_long.any():
        raise _too_long(store, block_size, label, lengths, is_long)
    kept = np.minimum(lengths, block_size)
    has_target = kept > 0 if config.train_on_prompt else count_targets(store, kept) > 0
    is_skipped = is_long & (config.truncation == "skip")
    if config.truncation == "skip":
        warn_count(is_skipped, label, f"dropped: longer than model.block_size {block_size}")
    else:
        warn_count(is_long & has_target, label, f"truncated to model.block_size {block_size}")
    warn_count(~has_target & ~is_skipped, label, f"dropped: no answer token within model.block_size {block_size}")
    selected = np.flatnonzero(has_target & ~is_skipped)
    if not len(selected):
        raise DataError(
            f"None of the {store.example_count:,} {label} examples can be used at model.block_size {block_size}.",
            remedy="Raise model.block_size.",
        )
    return Selection(selected, kept[selected])


def count_targets(store: ExampleStore, kept: Indexes) -> Indexes:
    """Number of answer tokens among the targets of each example."""
    counts = np.zeros(len(kept), dtype=np.int64)
    for first in range(0, len(kept), EXAMPLES_AT_ONCE):
        part = slice(first, first + EXAMPLES_AT_ONCE)
        starts = store.spans[part, 0]
        ends = store.spans[part, 1]
        cumulative = np.concatenate([[0], np.cumsum(store.answers[starts[0] : ends[-1]], dtype=np.int64)])
        first_target = np.minimum(starts + 1, ends)  # the first token is never a target
        end_target = starts + 1 + kept[part]
        counts[part] = cumulative[end_target - starts[0]] - cumulative[first_target - starts[0]]
    return counts


def _too_long(store: ExampleStore, block_size: int, label: str, lengths: Indexes, is_long: Mask) -> DataError:
    example = int(np.flatnonzero(is_long)[0])
    file, number = store.location(example)
    others = int(is_long.sum()) - 1
    more = f"; {others:,} more {label} examples are too long" if others else ""
    return DataError(
        f"{file.name}, {file.unit} {number}: the example has {lengths[example]:,} tokens, more than model.block_size "
        f"{block_size}{more}.",
        remedy=f"Raise model.block_size (the longest example needs {lengths.max()}), "
        "or set data.truncation to right or skip.",
    )


def warn_count(mask: Mask, label: str, what: str, noun: str = "examples") -> None:
    count = int(mask.sum())
    if count:
        verb = "was" if count == 1 else "were"
        warn_once("DATA", f"{count:,} of {len(mask):,} {label} {noun} {verb} {what}")
