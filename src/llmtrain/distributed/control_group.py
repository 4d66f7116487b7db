"""Small messages between the processes of a run: flags, counts, errors. Tensors of the model go elsewhere.

They travel over gloo, on the CPU, so asking never waits for a GPU. In a world of one everything is answered at once.
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
        """The sum over all ranks of each of some numbers."""
        if self.group is None:
            return numbers
        totals = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(totals, group=self.group)
        return [int(total) for total in totals]

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in the order of ranks."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """(...) of every rank, of one shape, as (ranks, ...) on the CPU."""
        mine = rows.detach().cpu().contiguous()
        if self.group is None:
            return mine.unsqueeze(0)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self.group)
        return torch.stack(found)

    def on_rank0(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, for everyone; where it fails there, it fails everywhere."""
        return cast(T, self._agree(lambda: make() if self.rank == 0 else None, share=True)[0])

    def barrier(self) -> None:
        self.any(False)

    def all_or_none(self, action: Callable[[], T]) -> T:
        """Do something on every rank; this rank's result. Where it fails on one rank it fails on all, with the same
        kind of error, so that no rank is left waiting for another that has gone."""
        return cast(T, self._agree(action, share=False)[self.rank])

    def gather_results(self, action: Callable[[], T]) -> list[T]:
        """As together, with the results of all ranks."""
        return cast(list[T], self._agree(action, share=True))

    def _agree(self, action: Callable[[], Any], share: bool) -> list[Any]:
        result: Any = None
        problem: Exception | None = None
        try:
            result = action()
        except (LlmtrainError, OSError) as caught:
            problem = caught
        outcomes = self.gather((result if share else None, _pack(problem)))
        if problem is not None:
            raise problem
        for rank, (_, packed) in enumerate(outcomes):
            if packed is not None:
                raise _unpack(packed, rank)
        values = [value for value, _ in outcomes]
        values[self.rank] = result
        return values


_Packed = tuple[str, str, str | None, int | None]
"""Kind of error, what is wrong, the remedy; of an OSError its errno."""


def _pack(problem: Exception | None) -> _Packed | None:
    if problem is None:
        return None
    if isinstance(problem, LlmtrainError):
        return type(problem).__name__, problem.what_and_known, problem.remedy, None
    return "OSError", f"{getattr(problem, 'strerror', None) or problem}", None, getattr(problem, "errno", None)


def _unpack(packed: _Packed, rank: int) -> Exception:
    name, what, remedy, number = packed
    if name == "OSError":
        text = f"rank {rank}: {what}"
        return OSError(text) if number is None else OSError(number, text)
    kind: Any = getattr(errors, name, LlmtrainError)
    if kind is errors.ConfigError:  # made from a list of problems
        kind = errors.UsageError
    error: LlmtrainError = kind(f"rank {rank}: {what}", remedy=remedy)
    return error


_TRANSPORT_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe")


@contextmanager
def peer_errors() -> Iterator[None]:
    """What the collective library raises when a peer is gone becomes PeerLost."""
    try:
        yield
    except Exception as problem:
        lost = as_peer_lost(problem)
        if lost is None:
            raise
        raise lost from None


def as_peer_lost(problem: BaseException) -> PeerLost | None:
    """The error to end with when a collective failed because another process is gone; None for any other problem."""
    text = str(problem)
    is_transport = isinstance(problem, dist.DistError) or (
        isinstance(problem, RuntimeError) and any(word in text.lower() for word in _TRANSPORT_WORDS)
    )
    if not is_transport:
        return None
    first_line = text.strip().splitlines()[0] if text.strip() else type(problem).__name__
    words = re.sub(r"^(\[[^]]*\]|\S+\.cc:\d+\]?)\s*", "", first_line)  # not the place in the library's source
    return PeerLost(
        f"Another process of the run is gone: {words[:200]}",
        remedy="Its own log says why. Start the run again: it goes on from the newest checkpoint.",
    )
