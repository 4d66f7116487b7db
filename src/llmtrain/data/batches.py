"""Batches of token ids for the model: which samples number n holds is decided by its number alone."""

import multiprocessing
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from llmtrain.errors import DataError

_LEFT_TO_THE_TRAINER = (signal.SIGINT, signal.SIGTERM)
IGNORE = -100
"""Target of a position that carries no loss (what torch's cross-entropy leaves out)."""


class Batch(NamedTuple):
    inputs: torch.Tensor  # (B, T) int64
    targets: torch.Tensor  # (B, T) int64, IGNORE where there is no loss
    target_count: int
    first_sample: int
    token_count: int  # inputs that are not padding
    positions: torch.Tensor | None = None  # (B, T) int64, where several rows share a sequence: each begins at 0

    def without_targets(self) -> "Batch":
        """A batch of the same shape whose loss and gradient are zero."""
        return self._replace(targets=torch.full_like(self.targets, IGNORE), target_count=0, token_count=0)

    def to(self, device: torch.device) -> "Batch":
        if device.type == "cpu":
            return self
        return self._replace(
            inputs=self.inputs.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            positions=None if self.positions is None else self.positions.to(device, non_blocking=True),
        )


class TrainBatches(Dataset[Batch], ABC):
    """Micro-batch number n of the run, for any n."""

    def __init__(self, micro_batch_size: int, micro_batches: int) -> None:
        self.size = micro_batch_size
        self.micro_batches = micro_batches
        """In a step, of all processes together."""

    @abstractmethod
    def __getitem__(self, number: int) -> Batch: ...

    @abstractmethod
    def steps_in(self, epochs: int) -> int:
        """Steps after which so many epochs are complete."""

    @abstractmethod
    def epochs_after(self, step: int) -> int:
        """Epochs that are complete after so many steps."""

    @property
    @abstractmethod
    def tokens_in_step(self) -> float:
        """Inputs that are not padding, in the mean step."""

    def samples_of_step(self, step: int) -> str:
        """What a step learned from, for messages. Steps count from 1, as in every message."""
        size = self.size * self.micro_batches
        return f"samples {(step - 1) * size} to {step * size - 1}"

    def stream(self, numbers: Sequence[int], workers: int, pin_memory: bool) -> Generator[Batch]:
        """The micro-batches with these numbers, in this order, prepared ahead when there are workers. Close it: workers
        that are left to the end of the interpreter would be ended with SIGTERM, which they ignore."""
        loader: DataLoader[Batch] = DataLoader(
            self,
            batch_size=None,
            sampler=numbers,
            num_workers=workers,
            pin_memory=pin_memory,
            # Not fork: the trainer has threads by now, and a lock that one of them holds stays locked in the worker.
            multiprocessing_context="spawn" if workers else None,
            worker_init_fn=_begin_worker,
            generator=torch.Generator(),  # the loader draws a seed nobody uses: not from the global generator
        )
        with _signals_blocked() if workers else nullcontext():
            batches = iter(loader)  # starts the workers
        yield from batches


class EvalBatches(ABC):
    """The validation split, always in the same order; all batches have `size` samples."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Batch:
        """Past the end: IndexError, which also ends iteration."""

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))


class MicroBatchNumbers(Sequence[int]):
    """Numbers of the micro-batches that one rank computes, from one step to another: `count` from `first` on of the
    `in_step` that a step has."""

    def __init__(self, first_step: int, end_step: int, in_step: int, first: int, count: int) -> None:
        self._first_step, self._steps, self._in_step = first_step, end_step - first_step, in_step
        self._offset, self._mine = first, count

    def __len__(self) -> int:
        return self._steps * self._mine

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        step, micro = divmod(index, self._mine)
        return (self._first_step + step) * self._in_step + self._offset + micro


def spread(batches: int, limit: int | None) -> npt.NDArray[np.int64]:
    """Which batches an evaluation reads: all, or evenly spread ones."""
    every = np.arange(batches)
    return every if limit is None else np.unique(np.linspace(0, batches - 1, limit).astype(np.int64))


def check_vocabulary(highest: int, vocab_size: int, path: object) -> None:
    if highest >= vocab_size:
        raise DataError(
            f"Token id {highest} in {path} is outside the vocabulary of {vocab_size}.",
            remedy="The token store is damaged: delete its directory, it is made anew.",
        )


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Workers inherit the mask, so that no signal ends one while it still imports torch; the trainer gets what came in
    the meantime afterwards."""
    resource_tracker.ensure_running()  # the first worker would start it, and it unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_TRAINER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(_: int) -> None:
    """Leave signals to the trainer: Ctrl-C reaches every process of the terminal, and a worker that died of it would
    take the trainer's save along. torch's own watch over the trainer begins only after this: one that was killed while
    the worker imported torch would never be missed."""
    trainer = multiprocessing.parent_process()
    if trainer is not None and not trainer.is_alive():
        os._exit(1)
    for number in _LEFT_TO_THE_TRAINER:
        signal.signal(number, signal.SIG_IGN)
