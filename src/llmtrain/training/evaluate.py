"""Loss and perplexity over batches of held-out text."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from llmtrain.data.batches import EvalBatches
from llmtrain.distributed.world import World
from llmtrain.models.base import LossFunction, evaluating


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
    batches: EvalBatches,
    world: World,
    autocast: Callable[[], AbstractContextManager[None]],
    stop: Callable[[], bool] = lambda: False,
) -> EvalResult | None:
    """Mean loss of a target token; None when told to stop before the end.

    The batches are dealt to the ranks in rounds. In the last round a rank may have none left and computes one for
    nothing: a sharded model needs everyone for every forward pass. The sum is taken in the order of the batches, so
    it is the same on any number of ranks."""
    mine, tokens = [], 0
    count = len(batches)
    with evaluating(module):
        for first in range(0, count, world.world_size):
            if stop():
                return None
            number = first + world.rank
            batch = batches[number if number < count else first].to(world.device)
            with autocast():
                mine.append(loss(module, batch.inputs, batch.targets, batch.positions).double())
            tokens += batch.target_count if number < count else 0
    rows = world.control.gather_rows(torch.stack(mine))  # (ranks, rounds)
    total = sum(rows.T.reshape(-1).tolist()[:count])
    tokens = world.control.sum(tokens)
    return EvalResult(total / tokens, tokens)
