"""Whether the logits of a model are its output layer applied to the last hidden state, and nothing else."""

from typing import Any

import torch
from torch import nn

_LARGE_LOGIT = 1000.0  # far above any cap


def changes_logits(base: Any, tokens: torch.Tensor) -> bool:
    """Whether the logits are not those of the output layer's weight if they are large, or once it is trained."""
    head, applied = base.get_output_embeddings(), []
    if hasattr(head, "base_layer"):  # its adapters, which start at zero, are no part of its weight
        return True

    largest = float(base(input_ids=tokens, use_cache=False).logits.abs().max())
    if not largest:
        return True  # cannot be known

    def enlarge(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(each * (_LARGE_LOGIT / largest) for each in inputs)

    hooks = [
        head.register_forward_pre_hook(enlarge),
        head.register_forward_hook(lambda _, __, output: applied.append(output)),
    ]
    try:
        logits = base(input_ids=tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return not (applied and float((logits - applied[0]).abs().max()) <= 1e-3 * _LARGE_LOGIT)
