"""Loss, perplexity and bits per byte on validation batches."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from llmtrain.core.targets import IGNORE_INDEX
from llmtrain.data.batches import EvalBatches, EvalGroup
from llmtrain.data.tokenizers.base import TokenBytes
from llmtrain.distributed.world import World
from llmtrain.models.base import evaluating
from llmtrain.training.model_handle import ModelHandle


@dataclass(frozen=True)
class EvalResult:
    loss: float
    tokens: int
    text_bytes: float | None = None
    """UTF-8 length of the text of the target tokens; None if it is unknown."""
    by_source: dict[str, "EvalResult"] = field(default_factory=dict)
    """The result of each source of a mixture, whose own loss is their mean, weighted by their shares."""

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
    groups = batches.groups()
    group_of = [index for index, each in enumerate(groups) for _ in range(each.batches)]
    tokens = [0] * len(groups)
    text_bytes = [0] * len(groups)
    count = len(batches)
    with evaluating(model.parallel.module):
        for first in range(0, count, world.world_size):
            if stop():
                return None
            number = first + world.rank
            batch = batches[number if number < count else first]
            if number < count:
                group = group_of[number]
                tokens[group] += batch.target_count
                if token_bytes is not None:
                    text_bytes[group] += int(token_bytes[batch.targets[batch.targets != IGNORE_INDEX].numpy()].sum())
            losses.append(model.loss(batch.to(world.device)).double())
    by_rank = world.control.gather_tensors(torch.stack(losses))  # (ranks, rounds)
    by_batch = by_rank.T.reshape(-1).tolist()
    sums = world.control.sums([*tokens, *text_bytes])
    results = []
    first = 0
    for index, each in enumerate(groups):
        total = sum(by_batch[first : first + each.batches])
        first += each.batches
        results.append(EvalResult(total / sums[index], sums[index], sums[len(groups) + index] or None))
    return _combined(results, groups)


def _combined(results: Sequence[EvalResult], groups: Sequence[EvalGroup]) -> EvalResult:
    if len(results) == 1:
        return results[0]
    loss = 0.0
    bytes_per_token = 0.0
    for result, group in zip(results, groups, strict=True):
        loss += group.share * result.loss
        bytes_per_token += group.share * (result.text_bytes or 0) / result.tokens
    tokens = sum(result.tokens for result in results)
    by_source = {group.label: result for result, group in zip(results, groups, strict=True)}
    return EvalResult(loss, tokens, bytes_per_token * tokens or None, by_source)
