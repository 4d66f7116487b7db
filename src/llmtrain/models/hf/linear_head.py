"""Whether the logits of a model are its output layer applied to the last hidden state, and nothing else."""

from typing import Any

import torch

_FACTOR = 1000.0  # makes logits far larger than any cap


def changes_logits(base: Any, tokens: torch.Tensor) -> bool:
    """Whether the logits are not those of the output layer's weight if they are large, or once it is trained."""
    head, applied = base.get_output_embeddings(), []
    if hasattr(head, "base_layer"):  # its adapters, which start at zero, are no part of its weight
        return True
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
