"""Batches of token ids for the model, made from a token store and a position."""

import signal
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from llmtrain.data.sampler import Positions, WindowSampler
from llmtrain.data.token_store import TokenStore
from llmtrain.errors import DataError

IGNORE = -100
"""Target of a position that carries no loss (what torch's cross-entropy leaves out)."""


class Batch(NamedTuple):
    inputs: torch.Tensor  # (B, T) int64
    targets: torch.Tensor  # (B, T) int64, IGNORE where there is no loss
    target_count: int
    first_sample: int

    def to(self, device: torch.device) -> "Batch":
        if device.type == "cpu":
            return self
        return self._replace(
            inputs=self.inputs.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
        )


class TrainBatches(Dataset[Batch]):
    """Micro-batch number n of the run, for any n."""

    def __init__(self, store: TokenStore, block_size: int, micro_batch_size: int, seed: int, vocab_size: int) -> None:
        check_length(store, block_size, "training")
        self.store, self.block_size, self.size, self.vocab_size = (
            store,
            block_size,
            micro_batch_size,
            vocab_size,
        )
        self.sampler = WindowSampler(len(store), block_size, seed)

    def __getitem__(self, number: int) -> Batch:
        first = number * self.size
        starts = self.sampler.starts(first, self.size)
        return _windows(self.store, starts, self.block_size, self.vocab_size, first)

    def epoch(self, number: int) -> int:
        return self.sampler.epoch_of(number * self.size)

    def stream(self, numbers: Sequence[int], workers: int, pin_memory: bool) -> Generator[Batch]:
        """The micro-batches with these numbers, in this order, prepared ahead when there are workers. Close it: workers
        that are left to the end of the interpreter would be ended with SIGTERM, to which they are deaf."""
        loader: DataLoader[Batch] = DataLoader(
            self,
            batch_size=None,
            sampler=numbers,
            num_workers=workers,
            pin_memory=pin_memory,
            worker_init_fn=_leave_signals_to_the_trainer,
            generator=torch.Generator(),  # the loader draws a seed nobody uses: not from the global generator
        )
        yield from loader


class MicroBatchNumbers(Sequence[int]):
    """Numbers of the micro-batches that one rank computes, from one step to another. Ranks take whole stretches of a
    step: of 8 micro-batches rank 1 of 2 has the last 4."""

    def __init__(self, first_step: int, end_step: int, in_step: int, rank: int, world_size: int) -> None:
        self._first_step, self._steps, self._in_step = first_step, end_step - first_step, in_step
        self._mine = in_step // world_size
        self._offset = rank * self._mine

    def __len__(self) -> int:
        return self._steps * self._mine

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        step, micro = divmod(index, self._mine)
        return (self._first_step + step) * self._in_step + self._offset + micro


class EvalBatches:
    """The validation text in order, as whole windows; with a limit, evenly spread ones, always the same."""

    def __init__(
        self,
        store: TokenStore,
        block_size: int,
        micro_batch_size: int,
        vocab_size: int,
        limit: int | None = None,
    ) -> None:
        check_length(store, block_size, "validation")
        self.store, self.block_size, self.size, self.vocab_size = (
            store,
            block_size,
            micro_batch_size,
            vocab_size,
        )
        windows = (len(store) - 1) // block_size
        batches = -(-windows // micro_batch_size)
        every = np.arange(batches)
        self._chosen = every if limit is None else np.unique(np.linspace(0, batches - 1, limit).astype(int))
        self._windows = windows

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Batch:
        first = int(self._chosen[index]) * self.size  # past the end: IndexError, which also ends iteration
        indexes = np.arange(first, min(first + self.size, self._windows), dtype=np.int64)
        batch = _windows(self.store, indexes * self.block_size, self.block_size, self.vocab_size, first)
        return _pad(batch, self.size)


def _leave_signals_to_the_trainer(_: int) -> None:
    """Ctrl-C reaches every process of the terminal; a worker that died of it would take the trainer's save along."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def check_length(store: TokenStore, block_size: int, label: str, may_shrink: bool = True) -> None:
    if len(store) < block_size + 1:
        shrink = f"Lower model.block_size to at most {max(1, len(store) - 1)}, or give" if may_shrink else "Give"
        raise DataError(
            f"The {label} text has {len(store)} tokens, fewer than model.block_size {block_size} + 1.",
            remedy=f"{shrink} more text.",
        )


def _windows(store: TokenStore, starts: Positions, block_size: int, vocab_size: int, first: int) -> Batch:
    rows = store.tokens[starts[:, None] + np.arange(block_size + 1)]  # (B, T + 1)
    highest = int(rows.max())
    if highest >= vocab_size:
        raise DataError(
            f"Token id {highest} in {store.path} is outside the vocabulary of {vocab_size}.",
            remedy="The token store is damaged: delete its directory, it is made anew.",
        )
    ids = torch.from_numpy(rows.astype(np.int64))
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), len(starts) * block_size, first)


def _pad(batch: Batch, rows: int) -> Batch:
    """Fill a short last batch with rows that carry no loss: every batch then has one shape (compiled once)."""
    missing = rows - len(batch.inputs)
    if not missing:
        return batch
    width = batch.inputs.shape[1]
    inputs = torch.cat([batch.inputs, batch.inputs.new_zeros(missing, width)])
    targets = torch.cat([batch.targets, batch.targets.new_full((missing, width), IGNORE)])
    return batch._replace(inputs=inputs, targets=targets)
