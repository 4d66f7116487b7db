"""Activation checkpointing: the backward pass computes activations of a block again instead of keeping them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Forward = Callable[..., Any]
_MATRIX_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def checkpoint_blocks(blocks: Sequence[nn.Module], is_selective: bool, has_dropout: bool) -> None:
    """Keep only the input of each block. If selective, also the inputs and outputs of attention, so that only the
    cheaper part of the block is computed again, most of all the feed-forward layer."""
    wrap = _selective if is_selective else _whole
    for block in blocks:
        block.forward = wrap(block.forward, has_dropout)


def _whole(forward: Forward, has_dropout: bool) -> Forward:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=has_dropout, **kwargs)

    return checkpointed


def _selective(forward: Forward, has_dropout: bool) -> Forward:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": has_dropout}

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # torch.compile accepts a global function as context_fn, but no variable.
        return checkpoint(forward, *args, context_fn=_selective_contexts, **options, **kwargs)

    return checkpointed


def _selective_contexts() -> Any:
    """For one pass of one block: save matrix products up to and including attention."""
    is_past_attention = {False: False, True: False}  # in the forward pass, and when it is repeated

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if "attention" in str(operation):
            is_past_attention[context.is_recompute] = True
            return CheckpointPolicy.MUST_SAVE
        is_saved = operation in _MATRIX_PRODUCTS and not is_past_attention[context.is_recompute]
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
