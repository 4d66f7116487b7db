"""Computing in bfloat16 with float32 weights.

Each weight is cast where its module uses it, so gradients reach the parameter in float32: optimizer, checkpoints and
other processes see float32 only. The casts are part of the graph, where a compiler fuses them; a cast ahead of the
forward pass would keep DDP from sending the gradients of one block during the backward pass of another.

Embeddings look up float32 weights and cast the rows they found: the gradient of a row sums over all its positions.
"""

import copy
from functools import cache
from typing import Any

import torch
from torch import nn


def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Make the module compute in `dtype`. Its trainable float32 parameters stay as they are, frozen ones are stored in
    `dtype`; buffers are left alone."""
    for parameter in module.parameters():
        if parameter.dtype == torch.float32 and not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    for part in module.modules():
        names = [name for name, each in part._parameters.items() if each is not None and each.dtype == torch.float32]
        if names:
            part.__class__ = _casting_class(type(part), tuple(names), dtype)  # type: ignore[arg-type]


def copy_in(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of the module with its float32 parameters in `dtype`, which computes the same. For inference."""
    copies: dict[int, Any] = {}
    for parameter in module.parameters():
        copies[id(parameter)] = parameter
        if parameter.dtype == torch.float32:
            copies[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
    return copy.deepcopy(module, copies)  # takes what it finds there for a copy


@cache
def _casting_class(kind: type[nn.Module], names: tuple[str, ...], dtype: torch.dtype) -> type[nn.Module]:
    """A subclass in which parameters, read as attributes, are cast; as entries of _parameters they are not."""
    if issubclass(kind, nn.Embedding):
        return type(kind.__name__, (kind,), {"forward": _casting_forward(kind, dtype)})
    return type(kind.__name__, (kind,), {name: _casting_property(name, dtype) for name in names})


def _casting_property(name: str, dtype: torch.dtype) -> property:
    return property(lambda part: part._parameters[name].to(dtype))


def _casting_forward(kind: type[nn.Module], dtype: torch.dtype) -> Any:
    def forward(part: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return kind.forward(part, *args, **kwargs).to(dtype)

    return forward
