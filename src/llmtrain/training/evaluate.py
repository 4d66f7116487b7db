"""Loss and perplexity on validation batches."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from llmtrain.data.batches import EvalBatches
from llmtrain.distributed.world import World
from llmtrain.models.base import evaluating
from llmtrain.training.model import ModelHandle


@dataclass(frozen=True)
class EvalResult:
    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def evaluate(
    model: ModelHandle, batches: EvalBatches, world: World, stop: Callable[[], bool] = lambda: False
) -> EvalResult | None:
    """Mean loss per target token; None if interrupted.

    Batches are distributed over the ranks in rounds. In the last round a rank without a batch of its own computes one
    whose result is not used: a sharded model needs every rank in every forward pass. The sum is taken in the order of
    the batches, so it does not depend on the number of ranks."""
    losses, tokens = [], 0
    count = len(batches)
    with evaluating(model.parallel.module):
        for first in range(0, count, world.world_size):
            if stop():
                return None
            number = first + world.rank
            batch = batches[number if number < count else first].to(world.device)
            losses.append(model.loss(batch).double())
            tokens += batch.target_count if number < count else 0
    by_rank = world.control.gather_tensors(torch.stack(losses))  # (ranks, rounds)
    total = sum(by_rank.T.reshape(-1).tolist()[:count])
    tokens = world.control.sum(tokens)
    return EvalResult(total / tokens, tokens)
