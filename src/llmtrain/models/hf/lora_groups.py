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

from llmtrain.models.fp8 import multiplies_in_fp8
from llmtrain.models.hf.lora_fp8 import Fp8LoraLinears, adapter_gradients, parts_of
from llmtrain.models.target_device import is_gpu

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
        layer.lora_group = group
        layer.lora_index = index
        layer.peft_forward = layer.forward
        layer.forward = types.MethodType(_forward, layer)


def _forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if layer.disable_adapters or layer.merged or kwargs or args:
        return layer.peft_forward(x, *args, **kwargs)
    group: LoraGroup = layer.lora_group
    if layer.lora_index == 0:
        outputs = lora_linear(x, group.layers)
        if len(outputs) > 1:
            group.input = x
            group.outputs = outputs
        return outputs[0]
    if group.input is not x:  # this architecture applies the layers to different tensors
        return lora_linear(x, [layer])[0]
    output = group.outputs[layer.lora_index]
    if layer.lora_index == len(group.layers) - 1:  # the last one: let go of the tensors
        group.input = None
        group.outputs = []
    return output


def lora_linear(x: Tensor, layers: Sequence[Any]) -> list[Tensor]:
    """x W^T + bias + x A^T (scaling B)^T of each layer."""
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    (name,) = layers[0].active_adapters
    a = []
    b = []
    weights = []
    biases = []
    for layer in layers:
        a.append(layer.lora_A[name].weight)  # (rank, in)
        b.append((layer.lora_B[name].weight * layer.scaling[name]).to(dtype))  # (out, rank)
        weights.append(layer.base_layer.weight.to(dtype))  # (out, in)
        bias = layer.base_layer.bias
        biases.append(None if bias is None else bias.to(dtype))
    stacked = torch.cat(a) if len(a) > 1 else a[0]  # (ranks, in)
    tensors = (*b, *weights, *biases)
    # An expert that no token was sent to has nothing to scale by.
    is_fp8 = multiplies_in_fp8(layers[0].base_layer) and x.numel() > 0
    function = Fp8LoraLinears if is_fp8 else _LoraLinears
    return list(function.apply(x.to(dtype), stacked.to(dtype), len(layers), *tensors))  # type: ignore[no-untyped-call]


class _LoraLinears(torch.autograd.Function):
    """The base weights and biases are frozen: they get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, count: int, *tensors: Any) -> tuple[Tensor, ...]:
        b = tensors[:count]
        weights = tensors[count : 2 * count]
        biases = tensors[2 * count :]
        rows = x.reshape(-1, x.shape[-1])  # (N, in)
        function = _forward_operator if torch.compiler.is_compiling() else forward_products
        *outputs, low = function(rows, a, list(b), list(weights), list(biases))
        ctx.save_for_backward(rows, low, a, *b, *weights)
        ctx.count = count
        return tuple(output.view(*x.shape[:-1], output.shape[1]) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        count = ctx.count
        rows, low, a, *tensors = ctx.saved_tensors
        grads = [grad.reshape(-1, grad.shape[-1]) for grad in upstream]  # (N, out)
        function = _backward_operator if torch.compiler.is_compiling() else backward_products
        needs_input = ctx.needs_input_grad[0]
        grad_x, grad_a, *grad_b = function(grads, rows, low, a, tensors[:count], tensors[count:], needs_input)
        grad_input = grad_x.view(*upstream[0].shape[:-1], grad_x.shape[1]) if needs_input else None
        return grad_input, grad_a, None, *grad_b, *[None] * (2 * count)


def forward_products(
    x: Tensor, a: Tensor, b: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """The outputs (N, out) of all layers, and x A^T (N, ranks)."""
    low = x @ a.t()
    results = []
    for part, b_one, weight, bias in zip(parts_of(low, b), b, weights, biases, strict=True):
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
    grad_low, grad_a, grad_b = adapter_gradients(grads, x, low, b)
    if not needs_input:
        return [x.new_empty(0), grad_a, *grad_b]
    grad_x = grad_low @ a
    for grad, weight in zip(grads, weights, strict=True):
        grad_x.addmm_(grad, weight)
    return [grad_x, grad_a, *grad_b]


# For torch.compile: the products as operators that it does not look into, and the shapes of their results.
_forward_operator = torch.library.custom_op("llmtrain::lora_forward", forward_products, mutates_args=())
_backward_operator = torch.library.custom_op("llmtrain::lora_backward", backward_products, mutates_args=())


@_forward_operator.register_fake
def _forward_shapes(x: Tensor, a: Tensor, _: Any, weights: Sequence[Tensor], __: Any) -> list[Tensor]:
    outputs = [x.new_empty(len(x), len(weight)) for weight in weights]
    return [*outputs, x.new_empty(len(x), len(a))]


@_backward_operator.register_fake
def _backward_shapes(
    _: Any, x: Tensor, __: Any, a: Tensor, b: Sequence[Tensor], ___: Any, needs_input: bool
) -> list[Tensor]:
    grad_x = torch.empty_like(x) if needs_input else x.new_empty(0)
    return [grad_x, torch.empty_like(a), *map(torch.empty_like, b)]
