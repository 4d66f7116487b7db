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
        own = tensor.detach().cpu().contiguous()
        if self.group is None:
            return own.unsqueeze(0)
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(gathered, own, group=self.group)
        return torch.stack(gathered)

    def on_rank0(self, action: Callable[[], T]) -> T:
        """Run the action on rank 0 and return its result on all ranks; if it fails, it fails on all ranks."""
        return cast(T, self._run(lambda: action() if self.rank == 0 else None, share_results=True)[0])

    def barrier(self) -> None:
        self.any(False)

    def all_or_none(self, action: Callable[[], T]) -> T:
        """Run the action on every rank and return this rank's result. If it fails on one rank it fails on all, with
        the same type of error, so that no rank waits for one that has ended."""
        return cast(T, self._run(action, share_results=False)[self.rank])

    def gather_results(self, action: Callable[[], T]) -> list[T]:
        """As all_or_none, with the results of all ranks."""
        return cast(list[T], self._run(action, share_results=True))

    def _run(self, action: Callable[[], Any], share_results: bool) -> list[Any]:
        result: Any = None
        problem: Exception | None = None
        try:
            result = action()
        except (LlmtrainError, OSError) as caught:
            problem = caught
        outcomes = self.gather((result if share_results else None, _pack(problem)))
        if problem is not None:
            raise problem
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
    return "OSError", f"{getattr(problem, 'strerror', None) or problem}", None, None, getattr(problem, "errno", None)


def _unpack(packed: _Packed, rank: int) -> Exception:
    name, what, remedy, reason, number = packed
    if name == "OSError":
        text = f"rank {rank}: {what}"
        return OSError(text) if number is None else OSError(number, text)
    type_: Any = getattr(errors, name, LlmtrainError)
    if type_ is errors.ConfigError:  # which takes a list of problems
        type_ = errors.UsageError
    error: LlmtrainError = type_(f"rank {rank}: {what}", remedy=remedy, reason=reason)
    return error


_TRANSPORT_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe")


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
    text = str(problem)
    is_transport = isinstance(problem, dist.DistError) or (
        isinstance(problem, RuntimeError) and any(word in text.lower() for word in _TRANSPORT_WORDS)
    )
    if not is_transport:
        return None
    first_line = text.strip().splitlines()[0] if text.strip() else type(problem).__name__
    message = re.sub(r"^(\[[^]]*\]|\S+\.cc:\d+\]?)\s*", "", first_line)  # without the library's source location
    return PeerLost(
        f"Lost the connection to another process of the run: {message[:200]}",
        remedy="See its log for the cause. Start the run again: it resumes from the newest checkpoint.",
    )
