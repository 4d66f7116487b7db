"""Batches of running text: windows of block_size tokens from a token store.

`document_end`: the token at the end of each document, if attention stops there (data.document_mask); None: a window is
one sequence.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmtrain.core.targets import IGNORE_INDEX
from llmtrain.data.batches import Batch, EvalBatches, TrainBatches, check_vocabulary, evenly_spaced
from llmtrain.data.sampler import Positions, WindowSampler
from llmtrain.data.store.token_store import TokenStore
from llmtrain.errors import DataError


class WindowBatches(TrainBatches):
    """A micro-batch may contain the last windows of one epoch and the first of the next."""

    def __init__(
        self,
        store: TokenStore,
        block_size: int,
        micro_batch_size: int,
        micro_batches: int,
        seed: int,
        vocab_size: int,
        document_end: int | None = None,
    ) -> None:
        super().__init__(micro_batch_size, micro_batches)
        check_length(store, block_size, "training")
        self.store = store
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.document_end = document_end
        self.sampler = WindowSampler(len(store), block_size, seed)

    def __getitem__(self, number: int) -> Batch:
        first = number * self.size
        starts = self.sampler.starts(first, self.size)
        windows = read_windows(self.store, starts, self.block_size, self.vocab_size)
        return window_batch(windows, first, self.document_end)

    def first_shape(self) -> tuple[int, int]:
        return self.size, self.block_size

    def steps_in(self, epochs: int) -> int:
        return -(-epochs * self.sampler.windows // (self.size * self.micro_batches))

    def epochs_after(self, step: int) -> int:
        return step * self.size * self.micro_batches // self.sampler.windows

    @property
    def tokens(self) -> int:
        return len(self.store)

    @property
    def tokens_per_step(self) -> float:
        return float(self.size * self.micro_batches * self.block_size)


class WindowEvalBatches(EvalBatches):
    """The validation text in order, as whole windows; with a limit, evenly spaced batches of it."""

    def __init__(
        self,
        store: TokenStore,
        block_size: int,
        micro_batch_size: int,
        vocab_size: int,
        limit: int | None = None,
        document_end: int | None = None,
    ) -> None:
        check_length(store, block_size, "validation")
        self.store = store
        self.block_size = block_size
        self.size = micro_batch_size
        self.vocab_size = vocab_size
        self.document_end = document_end
        self._windows = (len(store) - 1) // block_size
        self._chosen = evenly_spaced(-(-self._windows // micro_batch_size), limit)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Batch:
        first = int(self._chosen[index]) * self.size
        indexes = np.arange(first, min(first + self.size, self._windows), dtype=np.int64)
        windows = read_windows(self.store, indexes * self.block_size, self.block_size, self.vocab_size)
        return _pad(window_batch(windows, first, self.document_end), self.size)

    def largest_shape(self) -> tuple[int, int]:
        return self.size, self.block_size


def check_length(store: TokenStore, block_size: int, label: str) -> None:
    if len(store) < block_size + 1:
        raise DataError(
            f"The {label} text has {len(store)} tokens; model.block_size {block_size} needs at least {block_size + 1}.",
            remedy=f"Lower model.block_size to at most {max(1, len(store) - 1)}, or add more text.",
        )


def read_windows(store: TokenStore, starts: Positions, block_size: int, vocab_size: int) -> npt.NDArray[Any]:
    windows: npt.NDArray[Any] = store.tokens[starts[:, None] + np.arange(block_size + 1)]  # (B, T + 1)
    check_vocabulary(int(windows.max()), vocab_size, store.path)
    return windows


def window_batch(windows: npt.NDArray[Any], first: int, document_end: int | None = None) -> Batch:
    ids = torch.from_numpy(windows.astype(np.int64, copy=False))
    count = len(windows) * (windows.shape[1] - 1)
    positions = None
    if document_end is not None:
        positions = torch.from_numpy(document_positions(windows[:, :-1], document_end))
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), count, first, count, positions)


def document_positions(inputs: npt.NDArray[Any], document_end: int) -> npt.NDArray[np.int64]:  # (B, T) -> (B, T)
    """The position of each token in its document, or in the part of it that the window has."""
    places = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)
    starts = np.zeros(inputs.shape, np.int64)
    starts[:, 1:] = np.where(inputs[:, :-1] == document_end, places[:, 1:], 0)
    return places - np.maximum.accumulate(starts, axis=1)


def _pad(batch: Batch, size: int) -> Batch:
    """Fill a short last batch with samples without loss: one shape for all batches, so the model compiles once."""
    missing = size - len(batch.inputs)
    if not missing:
        return batch
    width = batch.inputs.shape[1]
    inputs = torch.cat([batch.inputs, batch.inputs.new_zeros(missing, width)])
    targets = torch.cat([batch.targets, batch.targets.new_full((missing, width), IGNORE_INDEX)])
    positions = batch.positions
    if positions is not None:
        positions = torch.cat([positions, torch.arange(width).expand(missing, width)])
    return batch._replace(inputs=inputs, targets=targets, positions=positions)
