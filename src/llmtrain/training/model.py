"""The handle through which every step of a run uses the model."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from llmtrain.data.batches import Batch
from llmtrain.distributed.parallel import ParallelModel
from llmtrain.models.base import LossFunction, ModelAdapter

Autocast = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class ModelHandle:
    adapter: ModelAdapter
    module: nn.Module
    """The model itself: its parameters and state, and what generates text."""
    parallel: ParallelModel
    """The model as training and evaluation call it: wrapped for ddp or fsdp."""
    loss_function: LossFunction
    """Compiled if trainer.compile is set."""
    autocast: Autocast

    def loss(self, batch: Batch) -> torch.Tensor:
        """Sum of the loss over the target tokens of a batch."""
        with self.autocast():
            return self.loss_function(self.parallel.module, batch.inputs, batch.targets, batch.positions)
