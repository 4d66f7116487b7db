"""LoRA layers with a common input, computed together with the frozen weights in FP8 (trainer.precision fp8).

The weights of all layers are one matrix, so that each pass has one large product, and the gradient of the input sums
over all layers inside of it. Casts are part of the compiled graph. The products, to which those of the adapters are
added in place, are custom operators: the compiler would turn the in-place products into copies.
"""

from collections.abc import Sequence
from typing import Any

import torch

from llmtrain.models.fp8 import E4M3, E5M2, cast, product, scale_of

Tensor = torch.Tensor


class Fp8LoraLinears(torch.autograd.Function):
    """x W^T + bias + x A^T B^T of each layer. The base weights and biases get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, count: int, *tensors: Any) -> tuple[Tensor, ...]:
        b = tensors[:count]
        weights = tensors[count : 2 * count]
        biases = tensors[2 * count :]
        rows = x.reshape(-1, x.shape[-1])  # (N, in)
        x_scale = scale_of(E4M3, rows)
        w_scale = scale_of(E4M3, *weights)
        weight = torch.cat([cast(each, w_scale, E4M3) for each in weights])  # (all out, in)
        function = _forward_operator if torch.compiler.is_compiling() else _forward_products
        out, low = function(cast(rows, x_scale, E4M3), x_scale, weight, w_scale, rows, a, list(b), list(biases))
        ctx.save_for_backward(rows, low, a, w_scale, *b, *weights)
        ctx.count = count
        outputs = torch.split(out, [len(each) for each in weights], dim=1)
        return tuple(output.view(*x.shape[:-1], output.shape[1]) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        count = ctx.count
        rows, low, a, w_scale, *tensors = ctx.saved_tensors
        b = tensors[:count]
        weights = tensors[count:]
        grads = [grad.reshape(-1, grad.shape[-1]) for grad in upstream]  # (N, out)
        operands = [rows.new_empty(0)] * 4
        needs_input = ctx.needs_input_grad[0]
        if needs_input:
            scale = scale_of(E5M2, *grads)
            grad = torch.cat([cast(each, scale, E5M2) for each in grads], dim=1)  # (N, all out)
            columns = torch.cat([cast(each, w_scale, E4M3).t() for each in weights], dim=1)  # (in, all out)
            operands = [grad, scale, columns, w_scale]
        function = _backward_operator if torch.compiler.is_compiling() else _backward_products
        grad_x, grad_a, *grad_b = function(operands, grads, rows, low, a, b, needs_input)
        grad_input = grad_x.view(*upstream[0].shape[:-1], grad_x.shape[1]) if needs_input else None
        return grad_input, grad_a, None, *grad_b, *[None] * (2 * count)


def _forward_products(
    x8: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    x: Tensor,
    a: Tensor,
    b: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> list[Tensor]:
    """The outputs (N, all out) of all layers, and x A^T (N, ranks)."""
    low = x @ a.t()
    out = product(x8, x_scale, weight, w_scale, x.dtype)
    parts = torch.split(out, [len(b_one) for b_one in b], dim=1)
    for part, low_part, b_one, bias in zip(parts, parts_of(low, b), b, biases, strict=True):
        part.addmm_(low_part, b_one.t())
        if bias is not None:
            part.add_(bias)
    return [out, low]


def _backward_products(
    operands: Sequence[Tensor],
    grads: Sequence[Tensor],
    x: Tensor,
    low: Tensor,
    a: Tensor,
    b: Sequence[Tensor],
    needs_input: bool,
) -> list[Tensor]:
    """Gradients of x (empty unless needed), of A and of each B."""
    grad_low, grad_a, grad_b = adapter_gradients(grads, x, low, b)
    if not needs_input:
        return [x.new_empty(0), grad_a, *grad_b]
    grad, scale, columns, w_scale = operands
    grad_x = product(grad, scale, columns, w_scale, x.dtype)
    grad_x.addmm_(grad_low, a)
    return [grad_x, grad_a, *grad_b]


def adapter_gradients(
    grads: Sequence[Tensor], x: Tensor, low: Tensor, b: Sequence[Tensor]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of x A^T, of A and of each B."""
    grad_low = torch.empty_like(low)  # (N, ranks)
    grad_b = []
    for grad, b_one, low_part, part in zip(grads, b, parts_of(low, b), parts_of(grad_low, b), strict=True):
        torch.mm(grad, b_one, out=part)
        grad_b.append(grad.t() @ low_part)
    return grad_low, grad_low.t() @ x, grad_b


def parts_of(low: Tensor, b: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The columns of each layer."""
    return torch.split(low, [b_one.shape[1] for b_one in b], dim=1)


_forward_operator = torch.library.custom_op("llmtrain::lora_fp8_forward", _forward_products, mutates_args=())
_backward_operator = torch.library.custom_op("llmtrain::lora_fp8_backward", _backward_products, mutates_args=())


@_forward_operator.register_fake
def _forward_shapes(_: Any, __: Any, weight: Tensor, ___: Any, x: Tensor, a: Tensor, *____: Any) -> list[Tensor]:
    return [x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(a))]


@_backward_operator.register_fake
def _backward_shapes(
    _: Any, __: Any, x: Tensor, ___: Any, a: Tensor, b: Sequence[Tensor], needs_input: bool
) -> list[Tensor]:
    grad_x = torch.empty_like(x) if needs_input else x.new_empty(0)
    return [grad_x, torch.empty_like(a), *map(torch.empty_like, b)]
