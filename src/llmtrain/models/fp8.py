"""Linear layers that multiply in FP8 while they are trained (trainer.precision fp8).

Each matrix is scaled by its largest value and rounded to 8 bits where it is used. Activations and weights have 3 bits
of mantissa (e4m3), gradients of outputs 2 bits and a larger range (e5m2): they are spread over more orders of
magnitude. Weights stay as they are, so that nothing new is saved; everything else, and a model in eval mode, computes
as with bf16.

Under torch.compile, the largest values are found and the casts are made by the kernels that compute the matrices. The
GPU multiplies rows by rows: each product below is of two matrices whose rows have the same length, and the backward
pass needs all three matrices transposed.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.config.trainer import FP8_MULTIPLE
from llmtrain.errors import UsageError

Tensor = torch.Tensor
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
LEAST_CAPABILITY = (8, 9)
_SMALLEST = 1e-30  # in the place of zero, which has no reciprocal


def check_fp8_device(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY:
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"the device {device.type}"
    raise UsageError(
        f"trainer.precision fp8 needs a GPU with FP8 (CUDA compute capability 8.9 or later: L4, L40S, H100, H200, "
        f"B200), and {name} has none.",
        remedy="Set trainer.precision to bf16.",
    )


def use_fp8(blocks: Sequence[nn.Module]) -> None:
    """Make the linear layers of the blocks multiply in FP8 while they are trained."""
    found = list(_linear_layers(blocks))
    if not found:
        raise UsageError(
            "trainer.precision fp8 is for linear layers of transformer blocks, and this model has none.",
            remedy="Set trainer.precision to bf16.",
        )
    odd = [f"{name} ({part.in_features} x {part.out_features})" for name, part in found if not _fits(part)]
    if odd:
        raise UsageError(
            f"trainer.precision fp8 needs widths that are multiples of {FP8_MULTIPLE}, which these layers do not have: "
            f"{', '.join(sorted(set(odd))[:5])}.",
            remedy="Set trainer.precision to bf16.",
        )
    for _, part in found:
        part.__class__ = _fp8_class(type(part))  # type: ignore[arg-type]


def _linear_layers(blocks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Linear]]:
    for block in blocks:
        for name, part in block.named_modules():
            if isinstance(part, nn.Linear) and "lora_" not in name:  # adapters are small: FP8 would cost more
                yield name, part


def _fits(part: nn.Linear) -> bool:
    return part.in_features % FP8_MULTIPLE == 0 and part.out_features % FP8_MULTIPLE == 0


def multiplies_in_fp8(part: nn.Module) -> bool:
    return getattr(part, "has_fp8", False) and part.training


@cache
def _fp8_class(kind: type[nn.Linear]) -> type[nn.Linear]:
    def forward(part: nn.Linear, x: Tensor) -> Tensor:
        if not part.training or x.numel() == 0:  # an expert that no token was sent to has nothing to scale by
            return kind.forward(part, x)
        stored = part._parameters["weight"]  # as an attribute it may be cast to bfloat16 (compute_dtype.py)
        out: Tensor = Fp8Linear.apply(x.reshape(-1, x.shape[-1]), stored)  # type: ignore[no-untyped-call]
        out = out.view(*x.shape[:-1], -1)
        return out if part.bias is None else out + part.bias

    return type(kind.__name__, (kind,), {"forward": forward, "has_fp8": True})


def scale_of(dtype: torch.dtype, *tensors: Tensor) -> Tensor:
    """What to divide the tensors by, so that their largest value becomes the largest number of the type. By row first,
    as the kernel of a norm computes its rows."""
    highest = [each.abs().amax(dim=-1).amax() for each in tensors]
    overall = highest[0] if len(highest) == 1 else torch.stack(highest).amax()
    return overall.float().clamp(min=_SMALLEST) / torch.finfo(dtype).max


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() * scale.reciprocal()).to(dtype)


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """a b^T, in `dtype`: a (n, k), b (m, k) -> (n, m). Products of activations and weights are summed with fewer bits,
    which is faster; those of gradients in float32."""
    is_forward = a.dtype == E4M3
    rows = a.contiguous()  # already so, unless the compiler chose another layout
    return torch._scaled_mm(rows, b.contiguous().t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=is_forward)


class Fp8Linear(torch.autograd.Function):
    """x W^T: (n, in), (out, in) -> (n, out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x_scale = scale_of(E4M3, x)
        w_scale = scale_of(E4M3, weight)
        ctx.save_for_backward(x, x_scale, weight, w_scale)
        return product(cast(x, x_scale, E4M3), x_scale, cast(weight, w_scale, E4M3), w_scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, x_scale, weight, w_scale = ctx.saved_tensors
        (grad,) = upstream  # (n, out)
        grad_scale = scale_of(E5M2, grad)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            columns = cast(weight, w_scale, E4M3).t().contiguous()  # (in, out)
            grad_x = product(cast(grad, grad_scale, E5M2), grad_scale, columns, w_scale, x.dtype)
        if ctx.needs_input_grad[1]:
            missing = -len(x) % FP8_MULTIPLE
            if missing:  # rows of zeros change nothing
                x = F.pad(x, (0, 0, 0, missing))
                grad = F.pad(grad, (0, 0, 0, missing))
            grad_columns = cast(grad, grad_scale, E5M2).t().contiguous()  # (out, n)
            x_columns = cast(x, x_scale, E4M3).t().contiguous()  # (in, n)
            grad_weight = product(grad_columns, grad_scale, x_columns, x_scale, weight.dtype)
        return grad_x, grad_weight
