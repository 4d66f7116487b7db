"""What CUDA's kernels save for the backward pass, on fake tensors of the CPU.

Most operations save the same tensors on both devices. These do not: attention with a mask or dropout (a CPU computes
the whole matrix), dropout (a CPU saves a mask in the data type of its input), RMSNorm (one kernel on a GPU, several
operations on a CPU).
"""

from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


class CudaKernels:
    """While it is active, these functions allocate and save what they would on a GPU. The results have no values.

    They are replaced in torch.nn.functional: a TorchFunctionMode is not active while the backward pass computes the
    activations of a checkpointed block again.
    """

    def __init__(self, mask_elements: int = 0) -> None:
        """`mask_elements`: of the mask that attention gets in each layer: B x T x T for packed examples with sdpa."""
        self._mask_elements = mask_elements
        self._patch = patch.multiple(F, scaled_dot_product_attention=self._attend, rms_norm=_rms_norm, dropout=_dropout)

    def __enter__(self) -> None:
        self._patch.start()

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        elements = self._mask_elements if attn_mask is None else attn_mask.numel()
        mask = q.new_empty(elements) if elements else None
        result: Tensor = _attention(q, k, v, mask)[0]
        return result


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:  # noqa: ARG001
    return _RmsNorm.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: ARG001
    if not training or p == 0.0:
        return input
    return torch.native_dropout(input, p, train=True)[0]  # saves a mask of one byte per element


# An operation of its own: selective checkpointing keeps the results of operations with `attention` in their name.
@torch.library.custom_op("llmtrain_plan::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Flash and cuDNN attention: save queries, keys, values, the result and one number per query."""
    raise NotImplementedError("for fake tensors")


@_attention.register_fake
def _allocate(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    B, heads, T, _ = q.shape  # noqa: N806
    # The result lies in memory as (B, T, heads, size): making it (B, T, C) copies nothing.
    result = q.new_empty(B, T, heads, v.shape[-1]).transpose(1, 2)
    return result, q.new_empty(B, heads, T, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _attention_backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, *_rest = ctx.saved_tensors
    sum_q = torch.empty_like(q, dtype=torch.float32)  # the gradient of q is summed in float32
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    del sum_q
    return *grads, None


_attention.register_autograd(_attention_backward, setup_context=_save)


class _RmsNorm(torch.autograd.Function):
    """Saves its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        factors = x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, factors)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _factors = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)
