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
    cheaper part of the block is computed again, most of all the feed-forward layer. Of a block with LoRA, whose
    adapters add to the results of matrix products in place, only the outputs of attention."""
    for block in blocks:
        contexts = None
        if is_selective:
            is_adapted = not all(parameter.requires_grad for parameter in block.parameters())
            contexts = _attention_contexts if is_adapted else _selective_contexts
        block.forward = _checkpointed(block.forward, contexts, has_dropout)


def _checkpointed(forward: Forward, contexts: Callable[[], Any] | None, has_dropout: bool) -> Forward:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": has_dropout}

    def whole(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    # torch.compile accepts a global function as context_fn, but no variable.
    def selective(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, context_fn=_selective_contexts, **options, **kwargs)

    def attention_only(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, context_fn=_attention_contexts, **options, **kwargs)

    return {None: whole, _selective_contexts: selective, _attention_contexts: attention_only}[contexts]


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


def _attention_contexts() -> Any:
    """For one pass of one block: save the outputs of attention."""

    def policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        is_saved = "attention" in str(operation)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
