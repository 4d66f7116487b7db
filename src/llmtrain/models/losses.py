"""Fused output layer and cross-entropy that never materializes all logits.

With a vocabulary of 128,000 the logits of a batch are by far the largest tensor of a training step. Here they exist
for one chunk of positions at a time: the forward pass computes the chunk's loss and gradient and frees its logits.
"""

from typing import Any

import torch

IGNORE_INDEX = -100
CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits per chunk: 64 MB of float32 stay near the caches of a CPU; a GPU needs large matrix products."""


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Sum of the cross-entropy of `hidden @ weight.T + bias` over all targets that are not IGNORE_INDEX."""
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)  # (N, C), (N,)
    if hidden.device.type == "cpu":  # prompts have no loss, so skip their logits
        kept = (targets != IGNORE_INDEX).nonzero().squeeze(1)
        if len(kept) < len(targets):
            hidden, targets = hidden[kept], targets[kept]
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    elif hidden.dtype != weight.dtype:
        hidden = hidden.to(weight.dtype)
    if not torch.is_grad_enabled():  # needs_input_grad is set even without grad mode
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    loss: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, targets)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        needs_grad = needs_hidden or needs_weight or needs_bias
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias and bias is not None else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        size = max(1, CHUNK_ELEMENTS["cuda" if hidden.is_cuda else "cpu"] // len(weight))
        for start in range(0, len(hidden), size):
            chunk = hidden[start : start + size]  # (n, C)
            logits = torch.nn.functional.linear(chunk, weight, bias)  # (n, V)
            loss, grad = _chunk_function(logits, targets[start : start + size], needs_grad)
            total += loss
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[start : start + size])
            if grad_weight is not None:
                grad_weight += grad.t() @ chunk  # product in the compute dtype, sum in float32
            if grad_bias is not None:
                grad_bias += grad.float().sum(0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        scale = upstream[0]
        return (
            None if grad_hidden is None else grad_hidden * scale.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * scale).to(ctx.dtypes[0]),
            None if grad_bias is None else (grad_bias * scale).to(ctx.dtypes[1]),
            None,
        )


def _chunk(logits: torch.Tensor, targets: torch.Tensor, needs_grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the loss over a chunk, and its gradient with respect to the logits, in their dtype."""
    has_loss = targets != IGNORE_INDEX
    index = targets.where(has_loss, 0).unsqueeze(1)
    logits32 = logits.float()
    norm = logits32.logsumexp(1, keepdim=True)
    losses = (norm - logits32.gather(1, index)).squeeze(1)
    loss = losses.where(has_loss, 0.0).sum()
    if not needs_grad:
        return loss, logits
    grad = (logits32 - norm).exp_()
    grad.scatter_add_(1, index, torch.full_like(norm, -1.0))
    grad *= has_loss.unsqueeze(1)
    return loss, grad.to(logits.dtype)


_chunk_function = _chunk


def compile_chunks() -> None:
    """Compile the chunk function, which fuses its passes over the logits into two."""
    global _chunk_function
    _chunk_function = torch.compile(_chunk)
