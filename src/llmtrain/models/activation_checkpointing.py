"""Activation checkpointing: the backward pass computes activations of a block again instead of keeping them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Forward = Callable[..., Any]
Policy = Callable[..., CheckpointPolicy]
"""(context of torch.utils.checkpoint, operation, its arguments) -> whether its result is saved"""
_MATRIX_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default)


def checkpoint_blocks(blocks: Sequence[nn.Module], is_selective: bool, has_dropout: bool) -> None:
    """Keep only the input of each block. If selective, also the inputs and outputs of attention, so that only the
    cheaper part of the block is computed again, most of all the feed-forward layer. Of a block with LoRA, whose
    adapters add to the results of matrix products in place, only the outputs of attention."""
    for block in blocks:
        is_adapted = not all(parameter.requires_grad for parameter in block.parameters())
        if not is_selective:
            wrap = _whole
            new_policy = _save_nothing
        elif is_adapted:
            wrap = _attention_only
            new_policy = _save_attention
        else:
            wrap = _selective
            new_policy = _save_attention_and_products
        call = _in_training(block.forward, wrap(block.forward, preserve_rng_state=has_dropout))
        # For llmtrain plan, which traces the block with marks in the place of the checkpoint.
        call.plain_forward = block.forward  # type: ignore[attr-defined]
        call.new_policy = new_policy  # type: ignore[attr-defined]
        block.forward = call


def _in_training(forward: Forward, checkpointed: Forward) -> Forward:
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return checkpointed(*args, **kwargs)
        return forward(*args, **kwargs)  # nothing is kept in any case

    return call


# torch.compile accepts a global function as context_fn, but no variable: hence a function per kind.
def _whole(forward: Forward, **options: Any) -> Forward:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _selective(forward: Forward, **options: Any) -> Forward:
    return lambda *args, **kwargs: checkpoint(
        forward, *args, use_reentrant=False, context_fn=_selective_contexts, **options, **kwargs
    )


def _attention_only(forward: Forward, **options: Any) -> Forward:
    return lambda *args, **kwargs: checkpoint(
        forward, *args, use_reentrant=False, context_fn=_attention_contexts, **options, **kwargs
    )


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_save_attention_and_products())  # type: ignore[no-untyped-call]


def _attention_contexts() -> Any:
    return create_selective_checkpoint_contexts(_save_attention())  # type: ignore[no-untyped-call]


# Policies, each for one pass of one block.
def _save_nothing() -> Policy:
    return lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE


def _save_attention() -> Policy:
    return _policy(saves_products=False)


def _save_attention_and_products() -> Policy:
    return _policy(saves_products=True)


def _policy(saves_products: bool) -> Policy:
    """Save outputs of attention; with `saves_products`, matrix products before it too."""
    is_past_attention = {False: False, True: False}  # in the forward pass, and when it is repeated

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if "attention" in str(operation):
            is_past_attention[context.is_recompute] = True
            return CheckpointPolicy.MUST_SAVE
        is_product = saves_products and operation in _MATRIX_PRODUCTS
        if is_product and not is_past_attention[context.is_recompute]:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy
