"""Checks a model of the user's own on one sequence, before the run exists."""

from typing import Any

import torch
from torch import nn

from llmtrain.data.batches import Batch
from llmtrain.models.base import ModelAdapter
from llmtrain.plugins import user_code, wrong_result
from llmtrain.training.random_state import preserved


def check_own_model(adapter: ModelAdapter, module: nn.Module, batch: Batch) -> None:
    """Refuse a module whose output the loss cannot use, and methods that fail. Weights, modes and random state stay as
    they are."""
    kind = type(adapter)
    inputs, targets = batch.inputs[:1], batch.targets[:1]
    positions = None if batch.positions is None else batch.positions[:1]
    modes = [(part, part.training) for part in module.modules()]
    module.eval()  # batch norm must not count this sequence
    try:
        with preserved(), torch.no_grad():
            if kind.loss is ModelAdapter.loss:
                with user_code(kind, "the module returned by build"):
                    logits = module(inputs)
                _check_logits(adapter, logits, tuple(inputs.shape))
            else:
                with user_code(kind, "loss"):
                    loss: object = adapter.loss(module, inputs, targets, positions)
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                    raise wrong_result(kind, "loss returned", loss, "a tensor with one element")
        with user_code(kind, "flops_per_token"):
            flops: object = adapter.flops_per_token(module)
        if not isinstance(flops, int | float):
            raise wrong_result(kind, "flops_per_token returned", flops, "a number")
    finally:
        for part, mode in modes:
            part.training = mode


def _check_logits(adapter: ModelAdapter, logits: Any, shape: tuple[int, ...]) -> None:
    is_right = (
        isinstance(logits, torch.Tensor)
        and logits.dim() == 3
        and logits.shape[:2] == shape
        and logits.shape[2] >= adapter.vocab_size
    )
    if not is_right:
        what = f"for token ids of shape {shape}, the module returned by build returned"
        expected = f"logits of shape (B, T, vocab_size), here {(*shape, adapter.vocab_size)}"
        raise wrong_result(type(adapter), what, logits, expected)
