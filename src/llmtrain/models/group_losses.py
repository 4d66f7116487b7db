"""The cross-entropy summed over groups of targets, such as the answers of preference pairs, a chunk at a time.

What is made of the sums is not known here, but it is linear for one target: its gradient is that of its own loss times
one factor per group, which the backward pass gets. Of a frozen output layer the gradient is therefore ready after one
pass over the chunks. The gradient of a trained one is a sum over all groups, so the backward pass computes the logits
a second time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from llmtrain.core.targets import IGNORE_INDEX
from llmtrain.models.target_device import is_planned


class Groups(NamedTuple):
    """The group of each target. Where a target is IGNORE_INDEX its group does not matter."""

    numbers: torch.Tensor  # (B, T) int64
    total: int


TokenLosses = Callable[[torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]]
"""(logits, targets, whether a gradient is needed) -> (loss of each target, gradient of the logits)"""
AddProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Adds grad^T hidden to a float32 total."""


def sums_of_logits(logits: torch.Tensor, targets: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The sum of each group, for a model whose logits are computed as a whole: (B, T, V), (B, T) -> (groups,)"""
    losses = F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1), reduction="none")
    return sum_by_group(losses, groups.numbers.reshape(-1), groups.total)


def sum_by_group(losses: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    """In float32, and in the order of the targets, which does not depend on what else is in the batch."""
    return torch.zeros(count, dtype=torch.float32, device=losses.device).index_add(0, index, losses)


class LinearGroupLosses(torch.autograd.Function):
    """(hidden (N, C), weight (V, C), bias (V,), targets (N,), group of each target (N,), ...) -> (groups,)"""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        index: torch.Tensor,
        count: int,
        rows: int,
        function: TokenLosses,
        add_product: AddProduct,
    ) -> torch.Tensor:
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        ctx.is_one_pass = needs_hidden and not needs_weight and not needs_bias
        ctx.rows = rows
        ctx.function = function
        ctx.add_product = add_product
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        grad_hidden = torch.empty_like(hidden) if ctx.is_one_pass else None
        losses = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        matrix, offset = _as(hidden.dtype, weight, bias)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = F.linear(hidden[part], matrix, offset)  # (n, V)
            losses[part], grad = function(logits, targets[part], ctx.is_one_pass)
            if grad_hidden is not None:
                torch.mm(grad, matrix, out=grad_hidden[part])
        if ctx.is_one_pass:
            ctx.save_for_backward(grad_hidden, index)
        elif needs_hidden or needs_weight or needs_bias:
            ctx.save_for_backward(hidden, weight, bias, targets, index)
        return sum_by_group(losses, index, count)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.is_one_pass:
            grad_hidden, index = ctx.saved_tensors
            factors = upstream[0][index].unsqueeze(1)  # (N, 1) float32: not rounded to bfloat16
            scaled = torch.mul(grad_hidden, factors, out=torch.empty_like(grad_hidden))
            return scaled, *[None] * 8
        return *_second_pass(ctx, upstream[0]), *[None] * 6


def _second_pass(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients of hidden states, weight and bias."""
    needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    hidden, weight, bias, targets, index = ctx.saved_tensors
    matrix, offset = _as(hidden.dtype, weight, bias)
    grad_hidden = torch.empty_like(hidden) if needs_hidden else None
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
    for start in range(0, len(hidden), ctx.rows):
        part = slice(start, start + ctx.rows)
        _, grad = ctx.function(F.linear(hidden[part], matrix, offset), targets[part], True)
        grad.mul_(upstream[index[part]].unsqueeze(1))  # (n, V)
        if grad_hidden is not None:
            torch.mm(grad, matrix, out=grad_hidden[part])
        if grad_weight is not None:
            ctx.add_product(grad_weight, grad, hidden[part])
        if grad_bias is not None:
            grad_bias += grad.float().sum(0)
    weight_dtype, bias_dtype = ctx.dtypes
    if grad_weight is not None:
        grad_weight = grad_weight.to(weight_dtype)
    if grad_bias is not None:
        grad_bias = grad_bias.to(bias_dtype)
    return grad_hidden, grad_weight, grad_bias


def _as(
    dtype: torch.dtype, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output layer in the data type of the hidden states. Cast here and not before, so that the gradient of a
    float32 weight is not rounded."""
    return weight.to(dtype), None if bias is None else bias.to(dtype)


# As the functions of a chunk in losses.py, with the loss of each target instead of their sum.


def token_losses(logits: torch.Tensor, targets: torch.Tensor, needs_grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each target of a chunk, and its gradient with respect to the logits, in their dtype."""
    has_loss = targets != IGNORE_INDEX
    index = targets.where(has_loss, 0).unsqueeze(1)
    logits32 = logits.float()
    norm = logits32.logsumexp(1, keepdim=True)
    losses = (norm - logits32.gather(1, index)).squeeze(1).where(has_loss, 0.0)
    if not needs_grad:
        return losses, logits
    grad = (logits32 - norm).exp_()
    grad.scatter_add_(1, index, torch.full_like(norm, -1.0))
    grad *= has_loss.unsqueeze(1)
    return losses, grad.to(logits.dtype)


def token_losses_in_place(
    logits: torch.Tensor, targets: torch.Tensor, needs_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, with the gradient in the place of the logits."""
    has_loss = targets != IGNORE_INDEX
    index = targets.where(has_loss, 0).unsqueeze(1)
    logits32 = logits.float()
    norm = logits32.logsumexp(1, keepdim=True)
    losses = (norm - logits.gather(1, index).float()).squeeze(1).where(has_loss, 0.0)
    if needs_grad:
        is_target = torch.arange(logits.shape[1], device=logits.device) == index  # (n, V)
        logits.copy_(((logits32 - norm).exp() - is_target.float()) * has_loss.unsqueeze(1))
    return losses, logits


def token_losses_by_kernel(
    logits: torch.Tensor, targets: torch.Tensor, needs_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in one kernel: see losses._chunk_by_kernel."""
    if is_planned():
        return logits.new_zeros(len(logits), dtype=torch.float32), logits
    from llmtrain.models.loss_kernel import token_cross_entropy_

    return token_cross_entropy_(logits, targets, needs_grad, IGNORE_INDEX)
