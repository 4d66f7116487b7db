"""Cross-entropy of an output layer without ever holding all logits.

A vocabulary of 128,000 makes the logits of a batch the largest tensor of a training step, several times over. Here
they exist a chunk of positions at a time: loss and gradient of the chunk are taken at once and the logits let go.
"""

from typing import Any

import torch

IGNORE_INDEX = -100
CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits held at once: 64 MB of float32 stay near a CPU's caches; a GPU wants large matrix products."""


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Sum of the cross-entropy of `hidden @ weight.T + bias` over all targets that are not IGNORE_INDEX."""
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if hidden.device.type == "cpu":  # prompts carry no loss: their logits need not be computed
        kept = (targets != IGNORE_INDEX).nonzero().squeeze(1)
        if len(kept) < len(targets):
            hidden, targets = hidden[kept], targets[kept]
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    elif hidden.dtype != weight.dtype:
        hidden = hidden.to(weight.dtype)
    if not torch.is_grad_enabled():  # autograd would still ask for the gradients of whatever is trained
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    loss: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, targets)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        wants_hidden, wants_weight, wants_bias, _ = ctx.needs_input_grad
        wants = wants_hidden or wants_weight or wants_bias
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias and bias is not None else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        rows = max(1, CHUNK_ELEMENTS["cuda" if hidden.is_cuda else "cpu"] // len(weight))
        for start in range(0, len(hidden), rows):
            here = hidden[start : start + rows]
            logits = torch.nn.functional.linear(here, weight, bias)
            loss, grad = _chunk_function(logits, targets[start : start + rows], wants)
            total += loss
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[start : start + rows])
            if grad_weight is not None:
                grad_weight += grad.t() @ here  # the product as fast as it goes, the sum in float32
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


def _chunk(logits: torch.Tensor, targets: torch.Tensor, wants_grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the loss over a chunk, and its gradient by the logits, in their dtype."""
    counts = targets != IGNORE_INDEX
    index = targets.where(counts, 0).unsqueeze(1)
    logits32 = logits.float()
    norm = logits32.logsumexp(1, keepdim=True)
    losses = (norm - logits32.gather(1, index)).squeeze(1)
    loss = losses.where(counts, 0.0).sum()
    if not wants_grad:
        return loss, logits
    grad = (logits32 - norm).exp_()
    grad.scatter_add_(1, index, torch.full_like(norm, -1.0))
    grad *= counts.unsqueeze(1)
    return loss, grad.to(logits.dtype)


_chunk_function = _chunk


def compile_chunks() -> None:
    """Fuse the passes over a chunk of logits into two."""
    global _chunk_function
    _chunk_function = torch.compile(_chunk)
