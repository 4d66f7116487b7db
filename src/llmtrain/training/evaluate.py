"""Loss, perplexity and bits per byte on validation batches."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

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
    metrics: dict[str, float] = field(default_factory=dict)
    """Means of the objective's metrics."""

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
    """Mean loss per item of the objective (a target token, or a pair); None if interrupted. `token_bytes`: of the
    tokenizer, to count bytes as well.

    Batches are distributed over the ranks in rounds. In the last round a rank without a batch of its own computes one
    whose result is not used: a sharded model needs every rank in every forward pass. The sum is taken in the order of
    the batches, so it does not depend on the number of ranks."""
    objective = model.objective
    rows = []
    items = 0
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
                items += objective.items(batch)
                tokens += batch.target_count
                if token_bytes is not None:
                    text_bytes += int(token_bytes[batch.targets[batch.targets != IGNORE_INDEX].numpy()].sum())
            sums = objective.sums(model, batch.to(world.device))
            rows.append(torch.cat([sums.loss.double().reshape(1), sums.metrics.double()]))
    by_rank = world.control.gather_tensors(torch.stack(rows))  # (ranks, rounds, 1 + metrics)
    columns = by_rank.transpose(0, 1).reshape(-1, by_rank.shape[-1])[:count].T.tolist()
    items, tokens, text_bytes = world.control.sums([items, tokens, text_bytes])
    loss, *metrics = (sum(column) / items for column in columns)
    return EvalResult(loss, tokens, text_bytes or None, dict(zip(objective.metric_names, metrics, strict=True)))
