"""LoRA layers that read the same input, computed together: q, k and v; gate and up.

Their A matrices are stacked, so that the input is read once for all of them in each pass, and it is saved once for the
backward pass. The adapter's product is the start value of the base layer's matrix product, which adds to it as it
writes its result; a sum of two results would read and write each output once more. Under torch.compile both passes are
custom operators: the compiler would turn the in-place products into copies. It still decides what to save and what to
recompute (norms, SwiGLU), because the operators' inputs are ordinary tensors of its graph.
"""

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that transformers' architectures apply to the same tensor."""


class LoraGroup:
    """Layers of one module with a common input. The first one called computes all of them."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.input: Tensor | None = None
        self.outputs: list[Tensor] = []
        """Outputs of the layers that are still to be called with `input`."""


def group_layers(adapted: nn.Module, layers: Sequence[Any]) -> None:
    """Give each of these layers, all plain LoRA without dropout, the forward pass of its group."""
    remaining = {id(layer): layer for layer in layers}
    for parent in adapted.modules():
        for names in GROUPS:
            found = [remaining.pop(id(getattr(parent, name, None)), None) for name in names]
            _use_group([layer for layer in found if layer is not None])
    for layer in remaining.values():
        _use_group([layer])


def _use_group(layers: list[Any]) -> None:
    group = LoraGroup(layers)
    for index, layer in enumerate(layers):
        layer.lora_group, layer.lora_index = group, index
        layer.peft_forward = layer.forward
        layer.forward = types.MethodType(_forward, layer)


def _forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if layer.disable_adapters or layer.merged or kwargs or args:
        output: Tensor = layer.peft_forward(x, *args, **kwargs)
        return output
    group: LoraGroup = layer.lora_group
    if layer.lora_index == 0:
        outputs = lora_linear(x, group.layers)
        if len(outputs) > 1:
            group.input, group.outputs = x, outputs
        return outputs[0]
    if group.input is not x:  # this architecture applies the layers to different tensors
        return lora_linear(x, [layer])[0]
    output = group.outputs[layer.lora_index]
    if layer.lora_index == len(group.layers) - 1:
        group.input, group.outputs = None, []
    return output


def lora_linear(x: Tensor, layers: Sequence[Any]) -> list[Tensor]:
    """x W^T + bias + x A^T (scaling B)^T of each layer."""
    device_type = x.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
    (name,) = layers[0].active_adapters
    a = [layer.lora_A[name].weight for layer in layers]
    stacked = (torch.cat(a) if len(a) > 1 else a[0]).to(dtype)  # (ranks, in)
    b = [(layer.lora_B[name].weight * layer.scaling[name]).to(dtype) for layer in layers]
    weights = [layer.base_layer.weight.to(dtype) for layer in layers]
    biases = [layer.base_layer.bias for layer in layers]
    biases = [None if bias is None else bias.to(dtype) for bias in biases]
    count = len(layers)
    return list(_LoraLinears.apply(x.to(dtype), stacked, count, *b, *weights, *biases))  # type: ignore[no-untyped-call]


class _LoraLinears(torch.autograd.Function):
    """The base weights and biases are frozen: they get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, count: int, *tensors: Any) -> tuple[Tensor, ...]:
        b, weights, biases = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
        rows = x.reshape(-1, x.shape[-1])  # (N, in)
        function = _forward_operator if torch.compiler.is_compiling() else forward_products
        *outputs, low = function(rows, a, list(b), list(weights), list(biases))
        ctx.save_for_backward(rows, low, a, *b, *weights)
        ctx.count = count
        return tuple(output.view(*x.shape[:-1], -1) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        count = ctx.count
        rows, low, a, *tensors = ctx.saved_tensors
        grads = [grad.reshape(-1, grad.shape[-1]) for grad in upstream]  # (N, out)
        function = _backward_operator if torch.compiler.is_compiling() else backward_products
        needs_input = ctx.needs_input_grad[0]
        grad_x, grad_a, *grad_b = function(grads, rows, low, a, tensors[:count], tensors[count:], needs_input)
        grad_input = grad_x.view(*upstream[0].shape[:-1], -1) if needs_input else None
        return grad_input, grad_a, None, *grad_b, *[None] * (2 * count)


def forward_products(
    x: Tensor, a: Tensor, b: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """The outputs (N, out) of all layers, and x A^T (N, ranks)."""
    low = x @ a.t()
    results = []
    for part, b_one, weight, bias in zip(_parts(low, b), b, weights, biases, strict=True):
        if is_gpu(x):  # the large product adds to the small one as it writes its result
            out = part @ b_one.t() if bias is None else torch.addmm(bias, part, b_one.t())
            out.addmm_(x, weight.t())
        else:
            out = nn.functional.linear(x, weight, bias)
            out.addmm_(part, b_one.t())
        results.append(out)
    return [*results, low]


def backward_products(
    grads: Sequence[Tensor],
    x: Tensor,
    low: Tensor,
    a: Tensor,
    b: Sequence[Tensor],
    weights: Sequence[Tensor],
    needs_input: bool,
) -> list[Tensor]:
    """Gradients of x (empty unless needed), of A and of each B."""
    grad_low = torch.empty_like(low)  # (N, ranks)
    grad_b = []
    for grad, b_one, low_part, part in zip(grads, b, _parts(low, b), _parts(grad_low, b), strict=True):
        torch.mm(grad, b_one, out=part)
        grad_b.append(grad.t() @ low_part)
    if not needs_input:
        return [x.new_empty(0), grad_low.t() @ x, *grad_b]
    grad_x = grad_low @ a
    for grad, weight in zip(grads, weights, strict=True):
        grad_x.addmm_(grad, weight)
    return [grad_x, grad_low.t() @ x, *grad_b]


def is_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _parts(low: Tensor, b: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The columns of each layer."""
    return torch.split(low, [b_one.shape[1] for b_one in b], dim=1)


@torch.library.custom_op("llmtrain::lora_forward", mutates_args=())
def _forward_operator(
    x: Tensor, a: Tensor, b: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    return forward_products(x, a, b, weights, biases)


@_forward_operator.register_fake
def _(
    x: Tensor,
    a: Tensor,
    b: Sequence[Tensor],  # noqa: ARG001
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],  # noqa: ARG001
) -> list[Tensor]:
    return [*[x.new_empty(len(x), len(weight)) for weight in weights], x.new_empty(len(x), len(a))]


@torch.library.custom_op("llmtrain::lora_backward", mutates_args=())
def _backward_operator(
    grads: Sequence[Tensor],
    x: Tensor,
    low: Tensor,
    a: Tensor,
    b: Sequence[Tensor],
    weights: Sequence[Tensor],
    needs_input: bool,
) -> list[Tensor]:
    return backward_products(grads, x, low, a, b, weights, needs_input)


@_backward_operator.register_fake
def _(
    grads: Sequence[Tensor],  # noqa: ARG001
    x: Tensor,
    low: Tensor,  # noqa: ARG001
    a: Tensor,
    b: Sequence[Tensor],
    weights: Sequence[Tensor],  # noqa: ARG001
    needs_input: bool,
) -> list[Tensor]:
    grad_x = torch.empty_like(x) if needs_input else x.new_empty(0)
    return [grad_x, torch.empty_like(a), *[torch.empty_like(b_one) for b_one in b]]
