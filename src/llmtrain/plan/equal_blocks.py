"""A model with many equal blocks is traced with a few of them: what each adds to the peak is the same for all.

Memory is largest either before the backward pass of the first block, where every block adds its activations, or from
then on, where every block adds its gradients. So the peaks of these two phases are straight lines in the number of
blocks, and the higher one at the real number is that of the step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from llmtrain.models.base import outer_lists
from llmtrain.plan.trace import MemoryTracker, Trace, extended

TRACED = (3, 4)
"""Numbers of blocks."""
FEWEST = 8
"""Fewer blocks are traced as they are."""


def equal_blocks(module: nn.Module) -> nn.ModuleList | None:
    """The blocks of a model, if there are many and all are equal."""
    lists = list(outer_lists(module))
    if len(lists) != 1 or len(lists[0]) < FEWEST:
        return None
    if len({_kind(block) for block in lists[0]}) > 1:
        return None
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and list(part) == lists[0]:
            return part
    return None


def _kind(block: nn.Module) -> tuple[Any, ...]:
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return type(block), *((name, each.shape, each.dtype, each.requires_grad) for name, each in tensors)


@contextmanager
def only_first(blocks: nn.ModuleList, count: int) -> Iterator[None]:
    """While it is active, the model has `count` blocks."""
    all_of_them = blocks._modules
    blocks._modules = dict(list(all_of_them.items())[:count])
    try:
        yield
    finally:
        blocks._modules = all_of_them


@contextmanager
def phases_of(tracker: MemoryTracker, blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Start the second phase where the backward pass has reached the result of the first block."""

    def on_second_block(_: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], torch.Tensor) and args[0].requires_grad:
            args[0].register_hook(lambda _: tracker.start_phase())  # type: ignore[no-untyped-call]

    if len(blocks) < 2:
        yield
        return
    handle = blocks[1].register_forward_pre_hook(on_second_block)
    try:
        yield
    finally:
        handle.remove()


def extrapolated(few: Sequence[Trace], more: Sequence[Trace], count: int) -> Trace | None:
    """The trace with `count` blocks, from the phases with TRACED; None if there are not two phases."""
    if len(few) != 2 or len(more) != 2:
        return None
    steps = (count - TRACED[1]) // (TRACED[1] - TRACED[0])
    phases = [extended(first, second, steps) for first, second in zip(few, more, strict=True)]
    return max(phases, key=lambda phase: phase.peak_bytes)
