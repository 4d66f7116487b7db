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
    metrics: dict[str, float] = field(default_factory=dict)
    """Means of the objective's metrics."""
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
    """Mean loss per item of the objective (a target token, or a pair); None if interrupted. `token_bytes`: of the
    tokenizer, to count bytes as well.

    Batches are distributed over the ranks in rounds. In the last round a rank without a batch of its own computes one
    whose result is not used: a sharded model needs every rank in every forward pass. The sum is taken in the order of
    the batches, so it does not depend on the number of ranks."""
    objective = model.objective
    groups = batches.groups()
    group_of = [index for index, each in enumerate(groups) for _ in range(each.batches)]
    rows = []
    items = [0] * len(groups)
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
                items[group] += objective.items(batch)
                tokens[group] += batch.target_count
                if token_bytes is not None:
                    text_bytes[group] += int(token_bytes[batch.targets[batch.targets != IGNORE_INDEX].numpy()].sum())
            sums = objective.sums(model, batch.to(world.device))
            rows.append(torch.cat([sums.loss.double().reshape(1), sums.metrics.double()]))
    by_rank = world.control.gather_tensors(torch.stack(rows))  # (ranks, rounds, 1 + metrics)
    by_batch = by_rank.transpose(0, 1).reshape(-1, by_rank.shape[-1])[:count]
    counts = world.control.sums([*items, *tokens, *text_bytes])
    results = []
    first = 0
    for index, each in enumerate(groups):
        columns = by_batch[first : first + each.batches].T.tolist()
        first += each.batches
        loss, *metrics = (sum(column) / counts[index] for column in columns)
        result = EvalResult(loss, counts[len(groups) + index], counts[2 * len(groups) + index] or None)
        result.metrics.update(zip(objective.metric_names, metrics, strict=True))
        results.append(result)
    return _combined(results, groups)


def _combined(results: Sequence[EvalResult], groups: Sequence[EvalGroup]) -> EvalResult:
    if len(results) == 1:
        return results[0]
    loss = 0.0
    bytes_per_token = 0.0
    metrics = dict.fromkeys(results[0].metrics, 0.0)
    for result, group in zip(results, groups, strict=True):
        loss += group.share * result.loss
        bytes_per_token += group.share * (result.text_bytes or 0) / result.tokens
        for name, value in result.metrics.items():
            metrics[name] += group.share * value
    tokens = sum(result.tokens for result in results)
    by_source = {group.label: result for result, group in zip(results, groups, strict=True)}
    return EvalResult(loss, tokens, bytes_per_token * tokens or None, metrics, by_source)
