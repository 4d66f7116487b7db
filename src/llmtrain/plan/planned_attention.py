"""The attention that a plan traces in the place of sdpa, flash and flex attention: all save the same tensors."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

NAME = "llmtrain_plan"
"""As model.attention in transformers."""


def use_planned_attention() -> str:
    """Tell transformers about it. It makes no masks for attention that it does not know: on fake tensors it would make
    them always."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)
    return NAME


def _attend(
    module: nn.Module,  # noqa: ARG001
    query: torch.Tensor,  # (B, heads, T, size)
    key: torch.Tensor,  # (B, kv heads, T, size)
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    is_grouped = query.shape[1] != key.shape[1]
    result = F.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, is_causal=attention_mask is None, enable_gqa=is_grouped
    )
    return result.transpose(1, 2).contiguous(), None  # (B, T, heads, size)
