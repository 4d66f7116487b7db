"""`next_token`: the cross-entropy of every target token."""

import torch

from llmtrain.data.batches import Batch
from llmtrain.training.objectives.base import BatchLosses, Objective, Sums


class NextToken(Objective):
    is_likelihood = True

    def items(self, batch: Batch) -> int:
        return batch.target_count

    def sums(self, model: BatchLosses, batch: Batch) -> Sums:
        loss = model.loss(batch)
        return Sums(loss, torch.empty(0, device=loss.device))
