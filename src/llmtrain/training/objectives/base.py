"""The contract of an objective: what the trainer needs from it."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, Protocol

import torch
from pydantic import BaseModel

from llmtrain.config.objective import ObjectiveSection
from llmtrain.data.batches import Batch
from llmtrain.models.group_losses import Groups
from llmtrain.plugins import parse_options


class BatchLosses(Protocol):
    """The model of a run, as an objective uses it."""

    def loss(self, batch: Batch) -> torch.Tensor:
        """Sum of the cross-entropy over all targets of a batch: ()."""

    def group_losses(self, batch: Batch, groups: Groups) -> torch.Tensor:
        """Sum of the cross-entropy over the targets of each group: (groups,)."""


class Sums(NamedTuple):
    """Sums over the items of a batch."""

    loss: torch.Tensor  # (), with its graph
    metrics: torch.Tensor  # (metrics,), in the order of metric_names


class Objective(ABC):
    """What a step minimizes: the mean of a loss over the items of the step, whichever micro-batch they are in. An item
    is a target token or a preference pair."""

    class Options(BaseModel):
        """What trainer.objective.options accepts: nothing, unless a class declares its own."""

    metric_names: tuple[str, ...] = ()
    """Metrics besides the loss, each a mean over items too. They are logged as train/NAME and val/NAME."""
    compares_answers: ClassVar[bool] = False
    """Whether it uses group_losses, of batches with pairs."""
    needs_reference: ClassVar[bool] = False
    """Whether batches need the log-probabilities of the model at step 0."""
    is_likelihood: ClassVar[bool] = False
    """Whether the loss is the negative log-likelihood of a token, so that perplexity follows from it."""

    def __init__(self, config: ObjectiveSection) -> None:
        self.config = config
        self.options: BaseModel = parse_options(type(self), getattr(config, "options", {}))

    @abstractmethod
    def items(self, batch: Batch) -> int:
        """Number of items of a batch."""

    @abstractmethod
    def sums(self, model: BatchLosses, batch: Batch) -> Sums:
        """Loss and metrics, summed over the items of a batch on the model's device."""
