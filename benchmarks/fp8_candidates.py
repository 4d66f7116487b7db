"""Candidates for the products of models/fp8.py, which finetune_gpu.py --candidates measures. What wins goes there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from llmtrain.models import fp8
from llmtrain.models.fp8 import E4M3, E5M2, Fp8Linear, cast, scale_of
from llmtrain.models.hf import lora_fp8


@contextmanager
def candidate(name: str) -> Iterator[None]:
    before = fp8.product, Fp8Linear.backward, lora_fp8.product, fp8.cast, lora_fp8.cast, fp8.E5M2
    try:
        if "fast sums" in name:
            fp8.product = lora_fp8.product = _fast_product
        if "slow sums" in name:
            fp8.product = lora_fp8.product = _slow_product
        if "kernel" in name:
            Fp8Linear.backward = staticmethod(_kernel_backward)
        if "bf16 weight gradients" in name:
            Fp8Linear.backward = staticmethod(_bf16_weight_backward)
        if "transposed from 8 bits" in name:
            Fp8Linear.backward = staticmethod(_twice_backward)
        yield
    finally:
        fp8.product, Fp8Linear.backward, lora_fp8.product, fp8.cast, lora_fp8.cast, fp8.E5M2 = before


def _fast_product(a: Any, a_scale: Any, b: Any, b_scale: Any, dtype: Any) -> Any:
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=True)


def _slow_product(a: Any, a_scale: Any, b: Any, b_scale: Any, dtype: Any) -> Any:
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=False)


def _kernel_backward(ctx: Any, grad: Any) -> Any:
    """The gradient is cast by one kernel that writes it twice."""
    from cast_kernel import cast_twice

    x, x_scale, weight, w_scale = ctx.saved_tensors
    grad_scale = scale_of(E5M2, grad)
    grad8, grad_columns = cast_twice(grad, grad_scale.reciprocal(), E5M2)
    columns = cast(weight, w_scale, E4M3).t().contiguous()
    grad_x = fp8.product(grad8, grad_scale, columns, w_scale, x.dtype)
    x_columns = cast(x, x_scale, E4M3).t().contiguous()
    return grad_x, fp8.product(grad_columns, grad_scale, x_columns, x_scale, weight.dtype)


def _bf16_weight_backward(ctx: Any, grad: Any) -> Any:
    """The gradient of the weight in bf16: neither x nor the gradient is transposed."""
    x, x_scale, weight, w_scale = ctx.saved_tensors
    grad_scale = scale_of(E5M2, grad)
    columns = cast(weight, w_scale, E4M3).t().contiguous()
    grad_x = fp8.product(cast(grad, grad_scale, E5M2), grad_scale, columns, w_scale, x.dtype)
    return grad_x, (grad.t() @ x).to(weight.dtype)


def _twice_backward(ctx: Any, grad: Any) -> Any:
    """The gradient is transposed from its 8 bits, not cast again."""
    x, x_scale, weight, w_scale = ctx.saved_tensors
    grad_scale = scale_of(E5M2, grad)
    grad8 = cast(grad, grad_scale, E5M2)
    columns = cast(weight, w_scale, E4M3).t().contiguous()
    grad_x = fp8.product(grad8, grad_scale, columns, w_scale, x.dtype)
    x_columns = cast(x, x_scale, E4M3).t().contiguous()
    transposed = torch.empty_like(grad8.t(), memory_format=torch.contiguous_format).copy_(grad8.t())
    return grad_x, fp8.product(transposed, grad_scale, x_columns, x_scale, weight.dtype)
