"""Follows the memory of a training step on fake tensors, which have shapes and lifetimes but no data."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK_BYTES = 512
"""CUDA's allocator rounds sizes up to a multiple."""
GRADIENTS = "gradients"
BACKWARD = "backward pass"
OUTSIDE = "embeddings and loss"
BLOCKS = "blocks"
"""Sums between the children of a block; all of a block that is compiled."""


@dataclass
class _Storage:
    size: int
    part: str
    born: int
    """Number of the operation."""
    died: int | None = None


@dataclass(frozen=True)
class Trace:
    """The tensors that a step creates."""

    peak_bytes: int
    parts: dict[str, int]
    """What is in memory at the peak, by the part of the model that created it, the largest first."""


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records when each storage is created and freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = OUTSIDE
        self.count = 0
        self.live = 0
        self.peak = 0
        self._peak_at = 0
        self._earlier: list[tuple[int, int]] = []
        self._known: dict[int, Any] = {}
        self._storages: list[_Storage] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return result

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count it: it exists before the step."""
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = weakref.ref(storage)

    @contextmanager
    def naming(self, part: str) -> Iterator[None]:
        """Attribute memory to a part."""
        before = self.part
        self.part = part
        yield
        self.part = before

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        record = _Storage(-(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES, self.part, self.count)
        self._storages.append(record)

        def freed(_: Any) -> None:
            record.died = self.count
            self.live -= record.size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self.live += record.size
        if self.live > self.peak:
            self.peak = self.live
            self._peak_at = self.count

    def start_phase(self) -> None:
        """Look for the peak anew."""
        self._earlier.append((self.peak, self._peak_at))
        self.peak = self.live
        self._peak_at = self.count

    def phases(self) -> list[Trace]:
        """The peak of each phase."""
        return [self._trace(*peak) for peak in (*self._earlier, (self.peak, self._peak_at))]

    def result(self) -> Trace:
        return max(self.phases(), key=lambda phase: phase.peak_bytes)

    def _trace(self, peak: int, at: int) -> Trace:
        parts: dict[str, int] = {}
        for each in self._storages:
            if each.born <= at and (each.died is None or each.died >= at):
                parts[each.part] = parts.get(each.part, 0) + each.size
        return Trace(peak, _largest_first(parts))


def extended(few: Trace, more: Trace, steps: float) -> Trace:
    """The straight line through two traces, so many times their distance beyond the second."""
    parts = {}
    for name, size in more.parts.items():
        parts[name] = int(size + steps * (size - few.parts.get(name, 0)))
    peak = more.peak_bytes + steps * (more.peak_bytes - few.peak_bytes)
    return Trace(int(peak), _largest_first(parts))


def _largest_first(parts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


@contextmanager
def naming_parts(tracker: MemoryTracker, blocks: Sequence[nn.Module]) -> Iterator[None]:
    """While modules run, attribute memory to the child of a block that is running, such as `attn` or `mlp`."""
    names: dict[nn.Module, str] = {}
    for block in blocks:
        names[block] = BLOCKS
        for name, child in block.named_children():
            names[child] = name
    stack: list[str] = []

    def enter(part: nn.Module, _: Any) -> None:
        if part in names:
            stack.append(names[part])
            tracker.part = stack[-1]

    def leave(part: nn.Module, _: Any, __: Any) -> None:
        if part in names:
            stack.pop()
            tracker.part = stack[-1] if stack else OUTSIDE

    with ExitStack() as hooks:
        hooks.callback(register_module_forward_pre_hook(enter).remove)
        hooks.callback(register_module_forward_hook(leave).remove)
        yield
