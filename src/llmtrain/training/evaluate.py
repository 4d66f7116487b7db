"""Loss and perplexity over batches of held-out text."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from llmtrain.data.batches import Batch
from llmtrain.training.step import LossFunction


@dataclass(frozen=True)
class EvalResult:
    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def evaluate(
    module: nn.Module,
    loss: LossFunction,
    batches: Iterable[Batch],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]],
    stop: Callable[[], bool] = lambda: False,
) -> EvalResult | None:
    """Mean loss of a target token; None when told to stop before the end."""
    was_training = module.training
    module.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    tokens = 0
    try:
        for batch in batches:
            if stop():
                return None
            on_device = batch.to(device)
            with autocast():
                total += loss(module, on_device.inputs, on_device.targets)
            tokens += batch.target_count
    finally:
        module.train(was_training)
    return EvalResult(float(total) / tokens, tokens)
