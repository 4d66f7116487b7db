"""Small messages between the processes of a run: flags, counts, errors. Tensors of the model use other groups.

They use gloo on the CPU, so they never wait for a GPU. With a world size of 1 there is no communication.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from llmtrain import errors
from llmtrain.errors import LlmtrainError, PeerLost

T = TypeVar("T")


@dataclass(frozen=True)
class ControlGroup:
    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def any(self, flag: bool) -> bool:
        return bool(self.sum(int(flag)))

    def sum(self, number: int) -> int:
        return self.sums([number])[0]

    def sums(self, numbers: list[int]) -> list[int]:
        """Element-wise sums over all ranks."""
        if self.group is None:
            return numbers
        totals = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(totals, group=self.group)
        return [int(total) for total in totals]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_tensors(self, tensor: torch.Tensor) -> torch.Tensor:
        """Tensors of the same shape (...) from all ranks, as (ranks, ...) on the CPU."""
        local = tensor.detach().cpu().contiguous()
        if self.group is None:
            return local.unsqueeze(0)
        gathered = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(gathered, local, group=self.group)
        return torch.stack(gathered)

    def on_rank0(self, action: Callable[[], T]) -> T:
        """Run the action on rank 0 and return its result on all ranks; if it fails, it fails on all ranks."""

        def run_on_rank0() -> T | None:
            if self.rank != 0:
                return None
            return action()

        return cast(T, self._run(run_on_rank0, share_results=True)[0])

    def barrier(self) -> None:
        self.any(False)

    def all_or_none(self, action: Callable[[], T]) -> T:
        """Run the action on every rank and return this rank's result. If it fails on one rank it fails on all, with
        the same exit code, so that no rank waits for one that has ended."""
        return cast(T, self._run(action, share_results=False)[self.rank])

    def gather_results(self, action: Callable[[], T]) -> list[T]:
        """Like all_or_none, with the results of all ranks."""
        return cast(list[T], self._run(action, share_results=True))

    def _run(self, action: Callable[[], Any], share_results: bool) -> list[Any]:
        result: Any = None
        problem: Exception | None = None
        try:
            result = action()
        except (LlmtrainError, OSError) as caught:  # anything else is a bug: it ends this process without an exchange
            problem = caught
        shared = None
        if share_results:
            shared = result
        outcomes = self.gather((shared, _pack(problem)))
        if problem is not None:
            raise problem  # itself, with its traceback, and not the copy that other ranks raise
        for rank, (_, packed) in enumerate(outcomes):
            if packed is not None:
                raise _unpack(packed, rank)
        values = [value for value, _ in outcomes]
        values[self.rank] = result
        return values


_Packed = tuple[str, str, str | None, errors.Reason | None, int | None]
"""Error type, message, remedy, reason, and the errno of an OSError."""


def _pack(problem: Exception | None) -> _Packed | None:
    if problem is None:
        return None
    if isinstance(problem, LlmtrainError):
        return type(problem).__name__, problem.what_and_known, problem.remedy, problem.reason, None
    what = getattr(problem, "strerror", None) or problem
    return "OSError", str(what), None, None, getattr(problem, "errno", None)


def _unpack(packed: _Packed, rank: int) -> Exception:
    name, what, remedy, reason, number = packed
    if name == "OSError":
        text = f"rank {rank}: {what}"
        if number is None:
            return OSError(text)
        return OSError(number, text)  # the number selects the subclass, such as FileNotFoundError
    return errors.error_class(name)(f"rank {rank}: {what}", remedy=remedy, reason=reason)


_TRANSPORT_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe")


def _is_of_transport(problem: BaseException) -> bool:
    if isinstance(problem, dist.DistError):
        return True
    # gloo raises RuntimeError, as a wrong tensor shape does: only the message distinguishes them.
    text = str(problem).lower()
    return isinstance(problem, RuntimeError) and any(word in text for word in _TRANSPORT_WORDS)


@contextmanager
def peer_errors() -> Iterator[None]:
    """Raise errors of collectives that a lost peer caused as PeerLost."""
    try:
        yield
    except Exception as problem:
        lost = as_peer_lost(problem)
        if lost is None:
            raise
        raise lost from None


def as_peer_lost(problem: BaseException) -> PeerLost | None:
    """The error for a collective that failed because a peer is gone; None for any other problem."""
    if not _is_of_transport(problem):
        return None
    first_line = type(problem).__name__
    text = str(problem).strip()
    if text:
        first_line = text.splitlines()[0]
    message = re.sub(r"^(\[[^]]*\]|\S+\.cc:\d+\]?)\s*", "", first_line)  # without the library's source location
    return PeerLost(
        f"Lost the connection to another process of the run: {message[:200]}",
        remedy="See its log for the cause. Start the run again: it resumes from the newest checkpoint.",
    )
