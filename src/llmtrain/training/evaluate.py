"""Loss, perplexity and bits per byte on validation batches."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from llmtrain.core.targets import IGNORE_INDEX
from llmtrain.data.batches import EvalBatches
from llmtrain.data.tokenizers.base import TokenBytes
from llmtrain.distributed.world import World
from llmtrain.models.base import evaluating
from llmtrain.training.model_handle import ModelHandle


@dataclass(frozen=True)
class EvalResult:
    loss: float
    tokens: int
    text_bytes: int | None = None
    """UTF-8 length of the text of the target tokens; None if it is unknown."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers, unlike the loss per token."""
        return self.loss * self.tokens / (math.log(2) * self.text_bytes) if self.text_bytes else None


@torch.no_grad()
def evaluate(
    model: ModelHandle,
    batches: EvalBatches,
    world: World,
    stop: Callable[[], bool] = lambda: False,
    token_bytes: TokenBytes | None = None,
) -> EvalResult | None:
    """Mean loss per target token; None if interrupted. `token_bytes`: of the tokenizer, to count bytes as well.

    Batches are distributed over the ranks in rounds. In the last round a rank without a batch of its own computes one
    whose result is not used: a sharded model needs every rank in every forward pass. The sum is taken in the order of
    the batches, so it does not depend on the number of ranks."""
    losses = []
    tokens = 0
    text_bytes = 0
    count = len(batches)
    with evaluating(model.parallel.module):
        for first in range(0, count, world.world_size):
            if stop():
                return None
            number = first + world.rank
            batch = batches[number if number < count else first]
            if number < count:
                tokens += batch.target_count
                if token_bytes is not None:
                    text_bytes += int(token_bytes[batch.targets[batch.targets != IGNORE_INDEX].numpy()].sum())
            losses.append(model.loss(batch.to(world.device)).double())
    by_rank = world.control.gather_tensors(torch.stack(losses))  # (ranks, rounds)
    total = sum(by_rank.T.reshape(-1).tolist()[:count])
    tokens, text_bytes = world.control.sums([tokens, text_bytes])
    return EvalResult(total / tokens, tokens, text_bytes or None)
