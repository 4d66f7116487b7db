"""Fused output layer and cross-entropy that never materializes all logits.

With a vocabulary of 128,000 the logits of a batch are by far the largest tensor of a training step. Here they exist
for one chunk of positions at a time: the forward pass computes the chunk's loss and gradient and frees its logits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from llmtrain.compat.numerics import Numerics
from llmtrain.core.targets import IGNORE_INDEX
from llmtrain.models.group_losses import (
    Groups,
    LinearGroupLosses,
    TokenLosses,
    token_losses,
    token_losses_by_kernel,
    token_losses_in_place,
)
from llmtrain.models.sizes import CHUNK_ELEMENTS, LARGE_CHUNK_ELEMENTS, TRAINED_CHUNK_ELEMENTS
from llmtrain.models.target_device import is_gpu, is_planned

OutputLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, Groups | None], torch.Tensor]
"""(hidden states, weight and bias of the output layer, targets, groups) -> sum of the losses, or of each group"""
ChunkFunction = Callable[[torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]]
"""(logits, targets, whether a gradient is needed) -> (sum of the losses, gradient of the logits)"""


def needs_chunks(tokens: torch.Tensor, vocab_size: int) -> bool:
    """Whether the logits of a batch of tokens are more than one chunk. Otherwise computing them all is as fast."""
    return tokens.numel() * vocab_size > CHUNK_ELEMENTS["cuda" if is_gpu(tokens) else "cpu"]


class ChunkedLoss:
    """The loss of a model as a function of its last hidden states, held by the module. A run that is compiled has
    another one (`compiled_loss`): nothing has to be undone when the run ends."""

    def __init__(self, numerics: Numerics, is_compiled: bool = False) -> None:
        """`numerics`: those of the run."""
        self.numerics = numerics
        self.is_compiled = is_compiled
        self._chunk: ChunkFunction = _chunk
        self._chunk_in_place: ChunkFunction = _chunk_in_place
        self._token_losses: TokenLosses = token_losses
        self._token_losses_in_place: TokenLosses = token_losses_in_place
        if is_compiled:
            self._token_losses = torch.compile(token_losses)
            self._token_losses_in_place = torch.compile(token_losses_in_place)
            self._chunk = torch.compile(_chunk)
            self._chunk_in_place = torch.compile(_chunk_in_place)

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        groups: Groups | None = None,
    ) -> torch.Tensor:  # (B, T, C), (V, C), (V,), (B, T) -> (), or (groups,)
        """Sum of the cross-entropy of `hidden @ weight.T + bias` over all targets that are not IGNORE_INDEX, or over
        those of each group. If their data types differ it is computed in bfloat16."""
        index = groups.numbers.reshape(-1) if groups else None
        hidden = hidden.reshape(-1, hidden.shape[-1])  # (N, C)
        targets = targets.reshape(-1)  # (N,)
        is_on_gpu = is_gpu(hidden)
        if not is_on_gpu and not is_planned():  # prompts have no loss, so skip their logits
            kept = (targets != IGNORE_INDEX).nonzero().squeeze(1)
            if len(kept) < len(targets):
                hidden = hidden[kept]
                targets = targets[kept]
                index = None if index is None else index[kept]
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden = hidden.to(dtype)
            weight = weight.to(dtype)
            bias = _optional_to(bias, dtype)
        elif hidden.dtype != weight.dtype:
            hidden = hidden.to(torch.bfloat16)
        if not torch.is_grad_enabled():  # needs_input_grad is set even without grad mode
            hidden = hidden.detach()
            weight = weight.detach()
            bias = None if bias is None else bias.detach()
        rows = self._rows_per_chunk(hidden, weight)
        # On a GPU the gradient takes the place of the logits: half the memory of the largest tensor.
        is_in_place = is_on_gpu and self.numerics.has_large_chunks
        uses_kernel = is_on_gpu and self.numerics.has_loss_kernel and self.is_compiled
        if groups is not None and index is not None:
            by_token = self._token_losses_in_place if is_in_place else self._token_losses
            if uses_kernel:
                by_token = token_losses_by_kernel
            add = partial(_add_product, is_in_place=is_in_place)
            return LinearGroupLosses.apply(  # type: ignore[no-untyped-call]
                hidden, weight, bias, targets, index, groups.total, rows, by_token, add
            )
        function = self._chunk_in_place if is_in_place else self._chunk
        if uses_kernel:
            function = _chunk_by_kernel
        values = (hidden, weight, bias, targets, rows, function, is_in_place)
        return _LinearCrossEntropy.apply(*values)  # type: ignore[no-untyped-call]

    def _rows_per_chunk(self, hidden: torch.Tensor, weight: torch.Tensor) -> int:
        """Positions per chunk: (rows, V) logits."""
        if not is_gpu(hidden):
            return max(1, CHUNK_ELEMENTS["cpu"] // len(weight))
        if not self.numerics.has_large_chunks:
            return max(1, CHUNK_ELEMENTS["cuda"] // len(weight))
        if not self.is_compiled:
            elements = CHUNK_ELEMENTS["cuda"]
        elif weight.requires_grad:
            elements = TRAINED_CHUNK_ELEMENTS
        else:
            elements = LARGE_CHUNK_ELEMENTS
        return even_rows(len(hidden), max(1, elements // len(weight)))


def compiled_loss(numerics: Numerics) -> OutputLoss:
    """A ChunkedLoss with compiled chunk functions; on a GPU our kernel takes their place if the numerics have it. A
    compiled model calls the loop over the chunks as it is: unrolled, it would be compiled once per chunk."""
    return torch.compiler.disable(ChunkedLoss(numerics, is_compiled=True).__call__)  # type: ignore[no-untyped-call]


def even_rows(total: int, most: int) -> int:
    """The largest chunk size up to `most` with which all chunks are equal (one shape to compile, and matrices of good
    sizes for a GPU); `most` itself if that would take more than twice as many chunks."""
    fewest = max(1, -(-total // most))
    for count in range(fewest, 2 * fewest + 1):
        if total % count == 0:
            return total // count
    return most


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        rows: int,
        function: ChunkFunction,
        is_in_place: bool,
    ) -> torch.Tensor:
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        needs_grad = needs_hidden or needs_weight or needs_bias
        grad_hidden = grad_weight = grad_bias = None
        if needs_hidden:
            grad_hidden = torch.empty_like(hidden)  # (N, C)
        if needs_weight:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)  # (V, C)
        if needs_bias and bias is not None:
            grad_bias = torch.zeros_like(bias, dtype=torch.float32)  # (V,)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # Cast here and not before, so that the gradient of a tied float32 weight is not rounded to bfloat16. A separate
        # output layer is cast before by compute_in, and its gradient is rounded.
        weight = weight.to(hidden.dtype)
        bias = _optional_to(bias, hidden.dtype)
        for start in range(0, len(hidden), rows):
            chunk = hidden[start : start + rows]  # (n, C)
            logits = torch.nn.functional.linear(chunk, weight, bias)  # (n, V)
            loss, grad = function(logits, targets[start : start + rows], needs_grad)
            total += loss
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[start : start + rows])
            if grad_weight is not None:
                _add_product(grad_weight, grad, chunk, is_in_place)
            if grad_bias is not None:
                grad_bias += grad.float().sum(0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        scale = upstream[0]  # (): the gradient of the sum, 1 / target tokens of the step
        if grad_hidden is not None:
            grad_hidden = grad_hidden * scale.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * scale).to(ctx.weight_dtype)
        if grad_bias is not None:
            grad_bias = (grad_bias * scale).to(ctx.bias_dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _optional_to(bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if bias is None else bias.to(dtype)


def _add_product(total: torch.Tensor, grad: torch.Tensor, chunk: torch.Tensor, is_in_place: bool) -> None:
    """Add grad^T chunk to a float32 total."""
    if is_in_place and grad.dtype == torch.bfloat16:  # the matrix product adds its float32 sums to the total
        if not is_planned():  # a CPU has no such product
            torch.addmm(total, grad.t(), chunk, out_dtype=torch.float32, out=total)
    else:
        total += grad.t() @ chunk  # product in the compute dtype, sum in float32


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


def _chunk_in_place(logits: torch.Tensor, targets: torch.Tensor, needs_grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of a chunk, with the gradient in the place of the logits. Compiled, it takes one pass for the
    norm and one for the gradient, where the scatter of `_chunk` works on a float32 copy."""
    has_loss = targets != IGNORE_INDEX
    index = targets.where(has_loss, 0).unsqueeze(1)
    logits32 = logits.float()
    norm = logits32.logsumexp(1, keepdim=True)
    losses = (norm - logits.gather(1, index).float()).squeeze(1)
    loss = losses.where(has_loss, 0.0).sum()
    if needs_grad:
        is_target = torch.arange(logits.shape[1], device=logits.device) == index  # (n, V)
        logits.copy_(((logits32 - norm).exp() - is_target.float()) * has_loss.unsqueeze(1))
    return loss, logits


def _chunk_by_kernel(
    logits: torch.Tensor, targets: torch.Tensor, needs_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of a chunk in one kernel, with about half the traffic to the GPU's memory. Needs Triton and a C
    compiler, as torch.compile does on a GPU."""
    if is_planned():
        return logits.new_zeros(len(logits), dtype=torch.float32).sum(), logits
    from llmtrain.models.loss_kernel import cross_entropy_

    return cross_entropy_(logits, targets, needs_grad, IGNORE_INDEX)
