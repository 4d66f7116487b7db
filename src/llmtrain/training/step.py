"""One optimizer step: forward and backward of its micro-batches, clipping, update. How many micro-batches a step has
(trainer.grad_accum_steps), and which rank computes which: distributed/batch_split.py."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from llmtrain.config.trainer import TrainerSection
from llmtrain.core.fault_injection import inject_fault
from llmtrain.core.seeds import derive_seed
from llmtrain.data.batches import Batch
from llmtrain.distributed.parallel import unshard
from llmtrain.distributed.world import World
from llmtrain.training.model_handle import ModelHandle
from llmtrain.training.random_state import seeded
from llmtrain.training.schedule import set_schedule


@dataclass(frozen=True)
class TokenCounts:
    """Tokens and items of a step, on all ranks."""

    targets: int
    inputs: int
    """Tokens the model reads, without padding."""
    loss_items: int
    """What the loss is averaged over: see Objective.items."""


@dataclass(frozen=True)
class StepResult:
    losses: torch.Tensor
    """(micro-batches of this rank,): their shares of the step's mean loss. On the device: reading waits for the GPU."""
    metrics: torch.Tensor
    """(micro-batches of this rank, metrics): the same of the objective's metrics."""
    grad_norm: torch.Tensor
    without_gradient: list[nn.Parameter]
    """Trained parameters that no loss of this rank's micro-batches depends on."""


@dataclass(frozen=True)
class Stepper:
    model: ModelHandle
    optimizer: torch.optim.Optimizer
    world: World
    seed: int
    config: TrainerSection
    on_micro_batch: Callable[[int, int, int], None]
    """Called before each micro-batch with the step, the number of the micro-batch from 1 and how many this rank has."""

    @cached_property
    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.module.parameters() if parameter.requires_grad]

    def train_step(self, step: int, batches: Sequence[Batch], first_micro: int, counts: TokenCounts) -> StepResult:
        """The step's gradient is the mean over all its items (target tokens, or pairs), whichever rank and micro-batch
        they are in. `first_micro` is the index of the first batch within the step."""
        parallel = self.model.parallel
        losses = []
        metrics = []
        for index, batch in enumerate(batches):
            self.on_micro_batch(step + 1, index + 1, len(batches))
            inject_fault("forward", step + 1)
            is_last = index == len(batches) - 1
            with self._dropout(step, first_micro + index), parallel.micro_step(is_last):
                sums = self.model.objective.sums(self.model, batch.to(self.world.device))
                loss = sums.loss / counts.loss_items
                if inject_fault("loss", step + 1) == "nan":
                    loss = loss * float("nan")
                (loss * parallel.loss_scale).backward()  # type: ignore[no-untyped-call]
            parallel.after_backward()
            losses.append(loss.detach())
            metrics.append(sums.metrics / counts.loss_items)
        parallel.finish_gradients()
        without_gradient = parallel.without_gradient()
        parallel.share_buffers()
        inject_fault("after_backward", step + 1)
        limit = self.config.max_grad_norm or float("inf")  # without a limit, only measured
        grad_norm = unshard(nn.utils.clip_grad_norm_(self._trainable, limit, foreach=True))
        set_schedule(self.optimizer, step, self.config)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        inject_fault("after_optimizer", step + 1)
        return StepResult(torch.stack(losses), torch.stack(metrics), grad_norm, without_gradient)

    def _dropout(self, step: int, micro: int) -> AbstractContextManager[None]:
        """The dropout mask depends only on the position in the run, not on the rank."""
        if not self.model.adapter.uses_dropout:
            return nullcontext()
        return seeded(derive_seed(self.seed, "dropout", step, micro))
