"""The cache of keys and values of a transformers model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from llmtrain.models.base import NextLogits


def new_cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def cached_next_logits(module: nn.Module, block_size: int) -> NextLogits:
    """For generation: each token is computed once, until the context is full."""
    cache: Any = None
    cached = 0  # tokens in the cache

    def next_logits(ids: Sequence[int]) -> torch.Tensor:
        nonlocal cache, cached
        if cache is None or len(ids) > block_size:
            cache = new_cache()
            cached = max(0, len(ids) - block_size)
        new = torch.tensor([list(ids[cached:])], device=next(module.parameters()).device)
        logits: torch.Tensor = module(new, cache=cache)  # (1, T, V)
        cached = len(ids)
        return logits[0, -1]

    return next_logits
