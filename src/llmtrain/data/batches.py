"""Batches of token ids. The samples of micro-batch n depend only on n, the seed and the config."""

import multiprocessing
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing import resource_tracker
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from llmtrain.core.targets import IGNORE_INDEX
from llmtrain.errors import DataError

_TRAINER_SIGNALS = (signal.SIGINT, signal.SIGTERM)
Indexes = npt.NDArray[np.int64]
NO_SAMPLE = -1
"""In an order: the place of a sample that does not exist."""


class Pairs(NamedTuple):
    """Which answer of which preference pair each target of a batch belongs to. Answer 2 n is the chosen one of pair n,
    answer 2 n + 1 the rejected one."""

    answers: torch.Tensor  # (B, T) int64: number of the answer
    lengths: torch.Tensor  # (2 P,) int64: target tokens of each answer
    reference: torch.Tensor | None  # (2 P,) float32: log-probability of each answer at step 0, if it is needed

    @property
    def total(self) -> int:
        """Number of pairs."""
        return len(self.lengths) // 2

    def none(self) -> "Pairs":
        """No pair, for a batch of the same shape."""
        reference = None if self.reference is None else self.reference[:0]
        return Pairs(torch.zeros_like(self.answers), self.lengths[:0], reference)

    def to(self, device: torch.device) -> "Pairs":
        reference = None if self.reference is None else self.reference.to(device, non_blocking=True)
        answers = self.answers.to(device, non_blocking=True)
        return Pairs(answers, self.lengths.to(device, non_blocking=True), reference)


class Batch(NamedTuple):
    inputs: torch.Tensor  # (B, T) int64
    targets: torch.Tensor  # (B, T) int64, IGNORE_INDEX where there is no loss
    target_count: int
    first_sample: int
    token_count: int  # inputs that are not padding
    positions: torch.Tensor | None = None  # (B, T) int64, for packed sequences: restart at 0 with each example
    pairs: Pairs | None = None  # of preference pairs

    def without_targets(self) -> "Batch":
        """A batch of the same shape whose loss and gradient are zero."""
        without = self._replace(targets=torch.full_like(self.targets, IGNORE_INDEX), target_count=0, token_count=0)
        return without if self.pairs is None else without._replace(pairs=self.pairs.none())

    def first_sequence(self) -> "Batch":
        """A batch of the first sequence alone, to try a model on. Its counts are those of this batch."""
        positions = None if self.positions is None else self.positions[:1]
        return self._replace(inputs=self.inputs[:1], targets=self.targets[:1], positions=positions, pairs=None)

    def to(self, device: torch.device) -> "Batch":
        if device.type == "cpu":
            return self
        return self._replace(
            inputs=self.inputs.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            positions=None if self.positions is None else self.positions.to(device, non_blocking=True),
            pairs=None if self.pairs is None else self.pairs.to(device),
        )


class SourceProgress(NamedTuple):
    """How much of a source of a mixture has been used."""

    tokens: int
    epochs: float


class EvalGroup(NamedTuple):
    """Consecutive validation batches of one source."""

    label: str
    share: float
    """In the validation loss of all sources."""
    batches: int


class TrainBatches(Dataset[Batch], ABC):
    """Random access to the micro-batches of a run by their number."""

    def __init__(self, micro_batch_size: int, micro_batches: int) -> None:
        self.size = micro_batch_size
        self.micro_batches = micro_batches
        """Per optimizer step, over all processes."""

    @abstractmethod
    def __getitem__(self, number: int) -> Batch: ...

    @abstractmethod
    def steps_in(self, epochs: int) -> int:
        """Number of steps after which this many epochs are complete."""

    @abstractmethod
    def epochs_after(self, step: int) -> int:
        """Number of epochs that are complete after this many steps."""

    def epochs_at(self, step: int) -> float:
        """Epochs after this many steps, including the fraction of the current one."""
        complete = self.epochs_after(step)
        start = self.steps_in(complete)
        end = self.steps_in(complete + 1)
        return complete + (step - start) / max(1, end - start)

    def epoch_ended_at(self, step: int) -> int | None:
        """The number of the epoch that ended with a step."""
        epoch = self.epochs_after(step)
        if epoch == 0 or self.steps_in(epoch) != step:
            return None
        return epoch

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Input tokens of the training data that are used: after truncation, and without what is dropped."""

    @property
    @abstractmethod
    def tokens_per_step(self) -> float:
        """Mean number of input tokens per step, without padding."""

    @abstractmethod
    def first_shape(self) -> tuple[int, int]:
        """(sequences, tokens) of the first micro-batch, without building it."""

    def available_steps(self, steps: int) -> int:
        """How many of this many steps there is data for: fewer only where all sources of a mixture have max_epochs."""
        return steps

    def exhausted(self, steps: int) -> dict[str, int]:  # noqa: ARG002
        """The sources of a mixture that reach their max_epochs in these steps -> the step in which they do."""
        return {}

    def source_progress(self, step: int) -> dict[str, SourceProgress]:  # noqa: ARG002
        """Use of each source of a mixture after this many steps."""
        return {}

    def describe_samples(self, step: int) -> str:
        """The samples of a step, for messages. Steps count from 1, as in every message."""
        size = self.size * self.micro_batches
        return f"samples {(step - 1) * size} to {step * size - 1}"

    def stream(self, numbers: Sequence[int], workers: int, pin_memory: bool) -> Generator[Batch]:
        """Yield the micro-batches with these numbers, prefetched if there are workers.

        The caller must close the generator: at interpreter exit workers get SIGTERM, which they ignore.
        """
        loader: DataLoader[Batch] = DataLoader(
            self,
            batch_size=None,
            sampler=numbers,
            num_workers=workers,
            pin_memory=pin_memory,
            # Not fork: the trainer has threads, and a lock held by one of them would stay locked in the worker.
            multiprocessing_context="spawn" if workers else None,
            worker_init_fn=_init_worker,
            generator=torch.Generator(),  # the loader draws an unused seed; keep the global generator unchanged
        )
        with _signals_blocked() if workers else nullcontext():
            batches = iter(loader)  # starts the workers
        yield from batches


class SplitSamples(Protocol):
    """The samples of a split, by number."""

    def __len__(self) -> int: ...

    def batch(self, samples: Indexes, first_sample: int) -> Batch:
        """A batch of these samples; NO_SAMPLE becomes sequences without loss."""

    def shape(self, samples: Indexes) -> tuple[int, int]:
        """(sequences, tokens) of a batch of these samples."""


class EpochBatches(TrainBatches):
    """Micro-batches of samples that an epoch visits once, in an order of its own: examples, and preference pairs.

    An epoch is a whole number of steps. Its last step is filled up with samples without loss, so the samples of
    micro-batch n depend only on n and the seed.
    """

    samples: SplitSamples

    def __init__(self, micro_batch_size: int, micro_batches: int, seed: int) -> None:
        super().__init__(micro_batch_size, micro_batches)
        self.seed = seed
        self._order: tuple[int, Indexes] | None = None  # (epoch, order) of the last epoch: a cache

    @abstractmethod
    def order_of(self, epoch: int) -> Indexes:
        """All samples of an epoch in order, followed by NO_SAMPLE up to a whole number of micro-batches. The rest of
        the last step, which may be large, has no samples either."""

    @property
    def steps_in_epoch(self) -> int:
        return -(-len(self.samples) // (self.size * self.micro_batches))

    def steps_in(self, epochs: int) -> int:
        return epochs * self.steps_in_epoch

    def epochs_after(self, step: int) -> int:
        return step // self.steps_in_epoch

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps_in_epoch

    def __getitem__(self, number: int) -> Batch:
        return self.samples.batch(self._samples_of(number), number * self.size)

    def first_shape(self) -> tuple[int, int]:
        return self.samples.shape(self._samples_of(0))

    def samples_of_step(self, step: int) -> Indexes:
        """Steps count from 1."""
        numbers = range((step - 1) * self.micro_batches, step * self.micro_batches)
        return np.concatenate([self._samples_of(number) for number in numbers])

    def _samples_of(self, number: int) -> Indexes:
        epoch, index = divmod(number, self.steps_in_epoch * self.micro_batches)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self.order_of(epoch)
        samples = self._order[1][index * self.size : (index + 1) * self.size]
        if not len(samples):  # the rest of the last step
            return np.full(self.size, NO_SAMPLE, dtype=np.int64)
        return samples


class EvalBatches(ABC):
    """The validation split in a fixed order; all batches have the same number of samples."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Batch:
        """Raises IndexError past the end."""

    @abstractmethod
    def largest_shape(self) -> tuple[int, int]:
        """(sequences, tokens) of the largest batch, without building it."""

    def groups(self) -> list[EvalGroup]:
        """The batches by source, in order."""
        return [EvalGroup("", 1.0, len(self))]

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))


class MicroBatchNumbers(Sequence[int]):
    """Numbers of the micro-batches that one rank computes in steps first_step to end_step (exclusive): in each step,
    `count` of the `per_step` micro-batches, starting at `first`."""

    def __init__(self, first_step: int, end_step: int, per_step: int, first: int, count: int) -> None:
        self._first_step = first_step
        self._steps = end_step - first_step
        self._per_step = per_step
        self._first = first
        self._count = count

    def __len__(self) -> int:
        return self._steps * self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        step, micro = divmod(index, self._count)
        return (self._first_step + step) * self._per_step + self._first + micro


def whole_batches(samples: Indexes, size: int) -> Indexes:
    """The samples, followed by NO_SAMPLE up to a whole number of batches of this size."""
    filled = np.full(-(-len(samples) // size) * size, NO_SAMPLE, dtype=np.int64)
    filled[: len(samples)] = samples
    return filled


def evenly_spaced(batches: int, limit: int | None) -> Indexes:
    """Indexes of the batches to evaluate: all, or at most `limit` evenly spaced ones."""
    if limit is None:
        return np.arange(batches)
    return np.unique(np.linspace(0, batches - 1, limit).astype(np.int64))


def check_vocabulary(max_id: int, vocab_size: int, path: object) -> None:
    if max_id >= vocab_size:
        raise DataError(
            f"Token id {max_id} in {path} is outside the vocabulary of {vocab_size}: the token store is damaged.",
            remedy="Delete its directory; the next start rebuilds it.",
        )


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Workers inherit the mask, so that no signal kills one while it imports torch. The trainer receives pending
    signals afterwards."""
    resource_tracker.ensure_running()  # otherwise the first worker starts it, which unblocks signals
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _TRAINER_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _init_worker(_: int) -> None:
    """Ignore SIGINT and SIGTERM, and exit if the trainer is gone.

    Ctrl-C reaches every process of the terminal; a worker that died of it would make the trainer fail before it has
    saved. torch's watchdog for the parent starts after this function, and would miss a trainer that was killed while
    the worker imported torch.
    """
    trainer = multiprocessing.parent_process()
    if trainer is not None and not trainer.is_alive():
        os._exit(1)
    for number in _TRAINER_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
