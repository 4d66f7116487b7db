"""One optimizer step: forward and backward of its micro-batches, clipping, update."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from llmtrain.data.batches import Batch
from llmtrain.data.sampler import derive_seed
from llmtrain.training.faults import fault
from llmtrain.training.optim import set_lr

LossFunction = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StepResult:
    loss: torch.Tensor
    """Mean loss of a target token of the step. Still on the device: reading it waits for the GPU."""
    grad_norm: torch.Tensor


@dataclass(frozen=True)
class Stepper:
    module: nn.Module
    loss: LossFunction
    optimizer: torch.optim.Optimizer
    device: torch.device
    seed: int
    dropout: bool
    max_grad_norm: float | None
    autocast: Callable[[], AbstractContextManager[None]]

    def train_step(self, step: int, lr: float, batches: Sequence[Batch]) -> StepResult:
        """The step's gradient is the mean over all its target tokens, however they are spread over micro-batches."""
        target_count = sum(batch.target_count for batch in batches)
        total = torch.zeros((), device=self.device)
        for micro_index, batch in enumerate(batches):
            fault("forward", step + 1)
            if self.dropout:  # what is dropped depends on the position only, so a resumed run drops the same
                torch.manual_seed(derive_seed(self.seed, "dropout", step, micro_index))
            on_device = batch.to(self.device)
            with self.autocast():
                loss = self.loss(self.module, on_device.inputs, on_device.targets) / target_count
            if fault("loss", step + 1) == "nan":
                loss = loss * float("nan")
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        fault("after_backward", step + 1)
        grad_norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.max_grad_norm or float("inf"), foreach=True)
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        fault("after_optimizer", step + 1)
        return StepResult(total, grad_norm)
