"""A Triton kernel for the cross-entropy of a chunk of logits and its gradient.

torch.compile makes two kernels of it, one for the norm of each row and one for the gradient, and each reads all logits
from the GPU's memory. Here one program has one row, whose second reading comes from the cache.
"""

import torch
import triton
import triton.language as tl

BLOCK = 8192
"""Columns that a program has in registers at a time."""
WARPS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _row(  # type: ignore[no-untyped-def]
    logits,
    targets,
    losses,
    stride,
    columns,
    ignored: tl.constexpr,
    needs_grad: tl.constexpr,
    block: tl.constexpr,
):
    """The loss of one row and, in the place of the logits, its gradient."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target = tl.load(targets + row)
    has_loss = target != ignored
    end = tl.where(has_loss, columns, 0)  # nothing of a row without loss is read
    offsets = tl.arange(0, block)
    # The sum of exp(x - highest), kept per lane; it is rescaled when a higher value is found.
    highest = float("-inf")
    sums = tl.zeros([block], dtype=tl.float32)
    for first in range(0, end, block):
        x = tl.load(start + first + offsets, mask=first + offsets < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, axis=0))
        sums = sums * tl.exp(highest - higher) + tl.exp(x - higher)
        highest = higher
    norm = highest + tl.log(tl.sum(sums, axis=0))
    value = tl.load(start + tl.where(has_loss, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(has_loss, norm - value, 0.0))
    if needs_grad:
        tl.debug_barrier()  # no thread may overwrite a logit that another has yet to read as the target's
        for first in range(0, columns, block):
            column = first + offsets
            x = tl.load(start + column, mask=column < end, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - norm) - (column == target).to(tl.float32)
            gradient = tl.where(has_loss, gradient, 0.0)
            tl.store(start + column, gradient.to(logits.dtype.element_ty), mask=column < columns)


def cross_entropy_(
    logits: torch.Tensor, targets: torch.Tensor, needs_grad: bool, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the loss over a chunk of logits (n, V), and its gradient in their place."""
    losses, grad = token_cross_entropy_(logits, targets, needs_grad, ignore_index)
    return losses.sum(), grad


def token_cross_entropy_(
    logits: torch.Tensor, targets: torch.Tensor, needs_grad: bool, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row of a chunk of logits (n, V), and its gradient in their place."""
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(columns))
    _row[(rows,)](logits, targets, losses, logits.stride(0), columns, ignore_index, needs_grad, block, num_warps=WARPS)
    return losses, logits
