"""LoRA with peft: adding adapters, computing them, saving and loading them.

peft provides the layers, their initialization, merging and the file format. Only the forward pass of a plain LoRA layer
is replaced: it adds the low-rank product in place and saves nothing for the backward pass but the layer's input. Layers
with a common input are computed together (lora_groups.py).
"""

import re
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from llmtrain.config.model import LoraSection
from llmtrain.core.files import read_json, use_default_mode, write_json
from llmtrain.core.text import one_line
from llmtrain.errors import DataError, UsageError
from llmtrain.hub.find import is_id, looks_like_path
from llmtrain.hub.model_names import HubModel
from llmtrain.models.fp8 import multiplies_in_fp8
from llmtrain.models.hf.lora_groups import group_layers

ADAPTER = "adapter"
ADAPTER_CONFIG = "adapter_config.json"
BASE_RECORD = "llmtrain.json"
"""File in an adapter directory with the SHA-256 of the base model's files and, in a run, the path of the base model."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def add_lora(model: nn.Module, section: LoraSection, grouped: bool = True, excluded: Sequence[str] = ()) -> nn.Module:
    """The model with new adapters, which are its only trainable parameters. `grouped`: see use_fast_forward;
    `excluded`: modules that get none."""
    from peft import LoraConfig, TaskType, get_peft_model

    check_target_modules(model, section.target_modules, excluded)
    exclude_modules = None
    if excluded:
        exclude_modules = rf"({'|'.join(map(re.escape, excluded))})(\..*)?"
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]
        lora_dropout=section.dropout,
        target_modules=section.target_modules or "all-linear",
        exclude_modules=exclude_modules,
        use_rslora=section.rslora,
        use_dora=section.dora,
        task_type=TaskType.CAUSAL_LM,
        bias="none",
    )
    try:
        adapted: nn.Module = get_peft_model(cast(Any, model), config)
    except ValueError as problem:
        raise UsageError(
            f"peft cannot add LoRA to this model: {one_line(problem, 200)}",
            remedy="Set model.lora.target_modules to layers that peft supports.",
        ) from None
    use_fast_forward(adapted, grouped)
    return adapted


def check_target_modules(model: nn.Module, names: list[str], excluded: Sequence[str] = ()) -> None:
    """Refuse names that match no layer: peft ignores them silently if another name matches."""
    outside = tuple(f"{outer}." for outer in excluded)
    layers = []
    for name, module in model.named_modules():
        if is_linear(module) and not f"{name}.".startswith(outside):
            layers.append(name)
    unknown = []
    for name in names:
        if not any(f".{layer}".endswith(f".{name}") for layer in layers):
            unknown.append(name)
    if unknown:
        where = ""
        if excluded:
            where = f" outside of {', '.join(excluded)}, which text does not reach"
        raise UsageError(
            f"model.lora.target_modules: the model has no linear layer named {', '.join(unknown)}{where}.",
            known={layer.rpartition(".")[2] for layer in layers},
        )


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ in ("Conv1D", "Linear4bit")


def use_fast_forward(adapted: nn.Module, grouped: bool = True) -> None:
    """Replace the forward pass of plain LoRA layers. Others (DoRA, 4-bit, GPT-2's Conv1D) keep peft's. `grouped`
    computes layers with a common input together: other rounding, so runs of numerics version 1 do not."""
    plain = [layer for layer in lora_layers(adapted) if type(layer.base_layer) is nn.Linear and not layer.lora_variant]
    if grouped and not any(_has_dropout(layer) for layer in plain):  # dropout draws a mask per layer
        group_layers(adapted, plain)
        return
    for layer in plain:
        layer.peft_forward = layer.forward
        layer.forward = types.MethodType(_forward, layer)


def _has_dropout(layer: Any) -> bool:
    return any(not isinstance(dropout, nn.Identity) for dropout in layer.lora_dropout.values())


def lora_layers(adapted: nn.Module) -> Iterator[Any]:
    return (module for module in adapted.modules() if hasattr(module, "lora_A") and hasattr(module, "base_layer"))


def describe_adapted(adapted: nn.Module, unreached: list[str]) -> str:
    """`LoRA adapts 14 layers: down_proj, gate_proj, ...`"""
    layers = {id(layer) for layer in lora_layers(adapted)}
    names = {name.rpartition(".")[2] for name, part in adapted.named_modules() if id(part) in layers}
    text = f"LoRA adapts {len(layers)} layers: {', '.join(sorted(names))}"
    if unreached:
        text += f"; not those of {', '.join(unreached)}, which text does not reach"
    return text


def _forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if layer.disable_adapters or layer.merged or kwargs or args:
        return layer.peft_forward(x, *args, **kwargs)
    (name,) = layer.active_adapters
    dropout = layer.lora_dropout[name]
    base = layer.base_layer
    a = layer.lora_A[name].weight  # (rank, in)
    is_autocast = torch.is_autocast_enabled(x.device.type)
    if torch.compiler.is_compiling() or multiplies_in_fp8(base):
        # The compiler fuses this form better; it would turn the in-place operations below into copies.
        out = base(x)
        dropped = dropout(x)
        low = layer.lora_A[name](dropped if is_autocast else dropped.to(a.dtype))
        return (out + layer.lora_B[name](low) * layer.scaling[name]).to(out.dtype)
    dtype = torch.get_autocast_dtype(x.device.type) if is_autocast else x.dtype
    x = x.to(dtype)
    weight = base.weight.to(dtype)  # (out, in)
    bias = None if base.bias is None else base.bias.to(dtype)
    a = a.to(dtype)
    b = (layer.lora_B[name].weight * layer.scaling[name]).to(dtype)  # (out, rank)
    dropped = None
    if layer.training and not isinstance(dropout, nn.Identity):
        dropped = dropout(x)
    return _LoraLinear.apply(x, dropped, weight, bias, a, b)  # type: ignore[no-untyped-call]


class _LoraLinear(torch.autograd.Function):
    """x W^T + bias + dropout(x) A^T B^T, the second product added in place. The base weight is frozen: no gradient."""

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
        adapter_input = (x if dropped is None else dropped).reshape(-1, x.shape[-1])
        low = adapter_input @ a.t()  # (N, rank)
        out = nn.functional.linear(x, weight, bias)
        out.view(-1, out.shape[-1]).addmm_(low, b.t())
        ctx.save_for_backward(adapter_input, low, weight, a, b)
        ctx.has_dropped = dropped is not None
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        adapter_input, low, weight, a, b = ctx.saved_tensors
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
        return grad_x, grad_dropped, None, None, grad_low.t() @ adapter_input, grad.t() @ low


def save_adapter(adapted: Any, tensors: dict[str, torch.Tensor], directory: Path, base: HubModel | None) -> None:
    """Write adapter_config.json and adapter_model.safetensors as peft does, from gathered or copied tensors."""
    from safetensors import SafetensorError

    try:
        adapted.save_pretrained(str(directory), state_dict=tensors, save_embedding_layers=False)
    except (SafetensorError, ValueError) as problem:  # safetensors raises SafetensorError on ENOSPC too
        raise OSError(str(problem)) from None
    use_default_mode(directory / ADAPTER_WEIGHTS)
    # peft names the base model by the path it was loaded from, also in a model card of its own.
    (directory / "README.md").unlink(missing_ok=True)
    name_base_model(directory, base)


def name_base_model(directory: Path, base: HubModel | None) -> None:
    """Set the base model in adapter_config.json; None leaves it open, and peft then asks for the model."""
    path = directory / ADAPTER_CONFIG
    values = read_json(path)
    values["base_model_name_or_path"] = base.name if base else None
    values["revision"] = base.revision if base else None
    # peft keeps a set, whose order differs between processes.
    if isinstance(values.get("target_modules"), list):
        values["target_modules"].sort(key=_in_layer_order)
    write_json(path, values)


def _in_layer_order(name: str) -> list[tuple[bool, int | str]]:
    """Sorts layers.2 before layers.10."""
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in name.split(".")]


def named_base_model(directory: Path) -> HubModel | None:
    """The base model in adapter_config.json; None if there is none, or if it is a path, which others cannot load."""
    values = read_json(directory / ADAPTER_CONFIG) or {}
    name = values.get("base_model_name_or_path")
    revision = values.get("revision")
    if not isinstance(name, str) or looks_like_path(name) or Path(name).is_dir() or not is_id(name):
        return None
    return HubModel(name, revision if isinstance(revision, str) else None)


def has_adapter(module: nn.Module) -> bool:
    """Whether the module (CausalLM) has adapters of peft."""
    return hasattr(getattr(module, "model", None), "peft_config")


def merge_adapters(module: nn.Module) -> None:
    """Add the adapters to the weights, in float32, and remove them."""
    adapted: Any = module.model
    module.model = adapted.float().merge_and_unload()


def is_adapter_weight(name: str) -> bool:
    return ".lora_" in name


def adapter_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all adapter weights, gathered from the shards of all ranks."""
    tensors = {}
    for name, parameter in module.named_parameters():
        if is_adapter_weight(name):
            full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            tensors[name.removeprefix("model.")] = full.detach().cpu().clone()
    return tensors


def is_adapter(directory: Path) -> bool:
    return (directory / ADAPTER_CONFIG).is_file()


def load_adapter(model: nn.Module, directory: Path) -> nn.Module:
    """The model with the adapter of a directory; refuses an adapter of another base model."""
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    tensors = _read_adapter(directory)
    try:
        config = PeftConfig.from_pretrained(str(directory))
        config.base_model_name_or_path = getattr(model, "name_or_path", None)  # the directory may have been moved
        if config.modules_to_save:
            raise ValueError(f"modules_to_save {config.modules_to_save}, which llmtrain does not support")
        adapted: Any = get_peft_model(cast(Any, model), config)
        expected = get_peft_model_state_dict(adapted)
        names = expected.keys() | tensors.keys()
        mismatched = sorted(name for name in names if _shape(expected, name) != _shape(tensors, name))
    except Exception as problem:  # peft raises many types: unknown methods, missing layers
        mismatched = [f"{type(problem).__name__}: {one_line(problem, 200)}"]
    if mismatched:
        others = ""
        if len(mismatched) > 1:
            others = f" and {len(mismatched) - 1} more do not match"
        raise DataError(
            f"The adapter in {directory} does not fit this base model: {mismatched[0]}{others}.",
            remedy="Use the base model that the adapter was trained on.",
        )
    set_peft_model_state_dict(adapted, tensors)
    return adapted


def _read_adapter(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = directory / ADAPTER_WEIGHTS
    if not path.is_file():
        raise DataError(
            f"{directory} has no {ADAPTER_WEIGHTS}.", remedy="Use the adapter/ directory of a run or checkpoint."
        )
    try:
        return load_file(path)
    except (OSError, SafetensorError) as problem:
        raise DataError(f"{path} is damaged: {problem}.", remedy="Restore it from a backup.") from None


def _shape(tensors: dict[str, torch.Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None
