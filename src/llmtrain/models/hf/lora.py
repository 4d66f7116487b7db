"""LoRA by peft: where adapters are put, how they are computed, and the format they are kept in.

peft owns the layers, their initial values, merging and the files. Only the forward pass of a plain LoRA layer is ours:
it adds the adapter's share inside the matrix product and keeps nothing for the backward pass but the layer's input.
"""

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from llmtrain.config.model import LoraSection
from llmtrain.errors import DataError, UsageError

ADAPTER = "adapter"
ADAPTER_CONFIG = "adapter_config.json"
ORIGIN = "llmtrain.json"
"""Beside an adapter: the SHA-256 of the base model's files."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def add_lora(model: nn.Module, section: LoraSection) -> nn.Module:
    """The model with new adapters, the only parameters that are trained."""
    from peft import LoraConfig, TaskType, get_peft_model

    check_target_modules(model, section.target_modules)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]
        lora_dropout=section.dropout,
        target_modules=section.target_modules or "all-linear",
        use_rslora=section.rslora,
        use_dora=section.dora,
        task_type=TaskType.CAUSAL_LM,
        bias="none",
    )
    adapted: nn.Module = get_peft_model(cast(Any, model), config)
    speed_up(adapted)
    return adapted


def check_target_modules(model: nn.Module, names: list[str]) -> None:
    """Refuse names that no layer has: peft would leave them out without a word when another one matches."""
    layers = [name for name, module in model.named_modules() if is_linear(module)]
    strangers = [name for name in names if not any(layer == name or layer.endswith(f".{name}") for layer in layers)]
    if strangers:
        raise UsageError(
            f"model.lora.target_modules: no linear layer of the model is called {', '.join(strangers)}.",
            known={layer.rpartition(".")[2] for layer in layers},
        )


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ in ("Conv1D", "Linear4bit")


def speed_up(adapted: nn.Module) -> None:
    """Give plain LoRA layers the forward pass below. Others (DoRA, 4-bit, GPT-2's Conv1D) keep peft's own."""
    for layer in lora_layers(adapted):
        if type(layer.base_layer) is nn.Linear and not layer.lora_variant:
            layer.peft_forward = layer.forward
            layer.forward = types.MethodType(_forward, layer)


def lora_layers(adapted: nn.Module) -> Iterator[Any]:
    return (module for module in adapted.modules() if hasattr(module, "lora_A") and hasattr(module, "base_layer"))


def _forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if layer.disable_adapters or layer.merged or kwargs or args:
        plain: torch.Tensor = layer.peft_forward(x, *args, **kwargs)
        return plain
    (name,) = layer.active_adapters
    dropout = layer.lora_dropout[name]
    base = layer.base_layer
    a, b, weight, bias = layer.lora_A[name].weight, layer.lora_B[name].weight, base.weight, base.bias
    kind = x.device.type
    is_cast = torch.is_autocast_enabled(kind)
    if torch.compiler.is_compiling():
        # A compiler fuses this form better: what is in place below would become copies there.
        out: torch.Tensor = base(x)
        low = layer.lora_A[name](dropout(x) if is_cast else dropout(x).to(a.dtype))
        fused: torch.Tensor = (out + layer.lora_B[name](low) * layer.scaling[name]).to(out.dtype)
        return fused
    dtype = torch.get_autocast_dtype(kind) if is_cast else x.dtype
    x, weight, a = x.to(dtype), weight.to(dtype), a.to(dtype)
    b = (b * layer.scaling[name]).to(dtype)
    bias = None if bias is None else bias.to(dtype)
    dropped = dropout(x) if layer.training and not isinstance(dropout, nn.Identity) else None
    result: torch.Tensor = _LoraLinear.apply(x, dropped, weight, bias, a, b)  # type: ignore[no-untyped-call]
    return result


class _LoraLinear(torch.autograd.Function):
    """x W' + bias + x A' B', the second product added in place. The base weight gets no gradient: it is frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dropped: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
    ) -> torch.Tensor:
        into_adapter = (x if dropped is None else dropped).reshape(-1, x.shape[-1])
        low = into_adapter @ a.t()  # (N, rank)
        out = nn.functional.linear(x, weight, bias)
        out.view(-1, out.shape[-1]).addmm_(low, b.t())
        ctx.save_for_backward(into_adapter, low, weight, a, b)
        ctx.has_dropped = dropped is not None
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        into_adapter, low, weight, a, b = ctx.saved_tensors
        shape = upstream[0].shape
        grad = upstream[0].reshape(-1, shape[-1])
        grad_low = grad @ b  # (N, rank)
        grad_x = grad_dropped = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
            if not ctx.has_dropped:
                grad_x.addmm_(grad_low, a)
            grad_x = grad_x.view(*shape[:-1], -1)
        if ctx.has_dropped and ctx.needs_input_grad[1]:
            grad_dropped = (grad_low @ a).view(*shape[:-1], -1)
        return grad_x, grad_dropped, None, None, grad_low.t() @ into_adapter, grad.t() @ low


def save_adapter(adapted: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors, as peft itself does, from tensors that may have been
    gathered or copied."""
    from safetensors import SafetensorError

    try:
        adapted.save_pretrained(str(folder), state_dict=tensors, save_embedding_layers=False)
    except (SafetensorError, ValueError) as problem:  # the first is its word for a full disk, too
        raise OSError(str(problem)) from None


def is_adapter_weight(name: str) -> bool:
    return ".lora_" in name


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def load_adapter(model: nn.Module, folder: Path) -> nn.Module:
    """The model with the adapter of a directory; refuses one that was made for another model."""
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    tensors = _read_adapter(folder)
    try:
        config = PeftConfig.from_pretrained(str(folder))
        config.base_model_name_or_path = getattr(model, "name_or_path", None)  # it may have been moved
        adapted: Any = get_peft_model(cast(Any, model), config)
        own = get_peft_model_state_dict(adapted)
        differing = [name for name in own.keys() | tensors.keys() if _shape(own, name) != _shape(tensors, name)]
    except Exception as problem:  # of many kinds: unknown methods, layers that are not there
        differing = [f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"]
    if differing:
        raise DataError(
            f"The adapter in {folder} was made for another base model: {sorted(differing)[0]}"
            + (f" and {len(differing) - 1} others differ." if len(differing) > 1 else "."),
            remedy="Give the base model it was trained on.",
        )
    set_peft_model_state_dict(adapted, tensors)
    module: nn.Module = adapted
    return module


def _read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise DataError(f"{folder} has no {ADAPTER_WEIGHTS}.", remedy="Give the adapter/ of a run or checkpoint.")
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as problem:
        raise DataError(f"{path} is damaged: {problem}.") from None
    return tensors


def _shape(tensors: dict[str, torch.Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None
