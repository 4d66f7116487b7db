"""One optimizer step: forward and backward of its micro-batches, clipping, update."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from llmtrain.data.batches import Batch
from llmtrain.data.sampler import derive_seed
from llmtrain.distributed.parallel import ParallelModel, whole
from llmtrain.distributed.world import World
from llmtrain.fault_injection import inject_fault
from llmtrain.models.base import LossFunction
from llmtrain.training.optim import set_lr


@dataclass(frozen=True)
class StepResult:
    losses: torch.Tensor
    """(micro-batches of this rank,): their shares of the step's mean loss. On the device: reading waits for the GPU."""
    grad_norm: torch.Tensor
    target_count: int
    """Target tokens of the step, on all ranks."""
    token_count: int
    """Tokens the model read in the step, on all ranks, padding not counted."""


@dataclass(frozen=True)
class Stepper:
    wrapped: ParallelModel
    module: nn.Module
    """The model itself, without what is around it."""
    loss: LossFunction
    optimizer: torch.optim.Optimizer
    world: World
    seed: int
    dropout: bool
    max_grad_norm: float | None
    autocast: Callable[[], AbstractContextManager[None]]
    tick: Callable[[], None]
    """Called for each micro-batch: this rank moves."""

    def train_step(self, step: int, lr: float, batches: Sequence[Batch], first_micro: int) -> StepResult:
        """The step's gradient is the mean over all its target tokens, on whatever rank and micro-batch they are.
        `first_micro` is the place of the first batch in the step."""
        counts = [sum(batch.target_count for batch in batches), sum(batch.token_count for batch in batches)]
        target_count, token_count = self.world.control.sums(counts)
        losses = []
        for index, batch in enumerate(batches):
            self.tick()
            inject_fault("forward", step + 1)
            if self.dropout:  # what is dropped depends on the position only: not on rank, nor on when it is computed
                torch.manual_seed(derive_seed(self.seed, "dropout", step, first_micro + index))
            on_device = batch.to(self.world.device)
            with self.wrapped.micro_step(is_last=index == len(batches) - 1):
                with self.autocast():
                    total = self.loss(self.wrapped.module, on_device.inputs, on_device.targets, on_device.positions)
                    loss = total / target_count
                if inject_fault("loss", step + 1) == "nan":
                    loss = loss * float("nan")
                (loss * self.wrapped.loss_scale).backward()  # type: ignore[no-untyped-call]
            self.wrapped.after_backward()
            losses.append(loss.detach())
        self.wrapped.finish_gradients()
        inject_fault("after_backward", step + 1)
        limit = self.max_grad_norm or float("inf")
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        grad_norm = whole(nn.utils.clip_grad_norm_(trained, limit, foreach=True))
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        inject_fault("after_optimizer", step + 1)
        return StepResult(torch.stack(losses), grad_norm, target_count, token_count)
