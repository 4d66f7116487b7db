"""What only a forward pass shows about a model: does anything follow its output layer, and which of its parts does text
reach."""

from typing import Any

import torch

from llmtrain.models.base import evaluating, outermost_modules
from llmtrain.models.hf.lora import is_linear

_FACTOR = 1000.0  # makes logits far larger than any cap


def changes_logits(base: Any, tokens: torch.Tensor) -> bool:
    """Whether the logits are not those of the output layer's weight if they are large, or once it is trained."""
    head = base.get_output_embeddings()
    if hasattr(head, "base_layer"):  # its adapters, which start at zero, are no part of its weight
        return True
    applied: list[torch.Tensor] = []  # what the output layer gave
    hooks = [
        head.register_forward_pre_hook(lambda _, inputs: tuple(each * _FACTOR for each in inputs)),
        head.register_forward_hook(lambda _, __, output: applied.append(output)),
    ]
    try:
        logits = base(input_ids=tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    if not applied:
        return True
    largest = float(applied[0].abs().max())
    return not (largest and float((logits - applied[0]).abs().max()) <= 1e-3 * largest)  # all zero: cannot be known


def is_multimodal(config: Any) -> bool:
    """Whether the language model is one of several parts of the model, with a config of its own."""
    return config.get_text_config() is not config


def unreached_by_text(model: Any) -> list[str]:
    """Names of the outermost modules whose linear layers a forward pass of token ids does not call, such as a vision
    tower; none if the model cannot be run here. They get no gradient from text, so adapters there would not be
    trained."""
    linear = {name: part for name, part in model.named_modules() if is_linear(part)}
    reached: set[str] = set()
    hooks = [part.register_forward_pre_hook(lambda *_, name=name: reached.add(name)) for name, part in linear.items()]
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")  # others need a GPU
    try:
        with torch.no_grad(), evaluating(model):
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device))
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return []
    finally:
        model.set_attn_implementation(attention)
        for hook in hooks:
            hook.remove()
    return outermost_modules(linear.keys() - reached, reached)
