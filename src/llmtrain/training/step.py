"""One optimizer step: forward and backward of its micro-batches, clipping, update."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from llmtrain.data.batches import Batch
from llmtrain.data.sampler import derive_seed
from llmtrain.distributed.parallel import unshard
from llmtrain.distributed.world import World
from llmtrain.fault_injection import inject_fault
from llmtrain.training.model import ModelHandle
from llmtrain.training.optim import set_schedule
from llmtrain.training.random_state import seeded


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of a step, on all ranks."""

    targets: int
    inputs: int
    """Tokens the model reads, without padding."""


@dataclass(frozen=True)
class StepResult:
    losses: torch.Tensor
    """(micro-batches of this rank,): their shares of the step's mean loss. On the device: reading waits for the GPU."""
    grad_norm: torch.Tensor


@dataclass(frozen=True)
class Stepper:
    model: ModelHandle
    optimizer: torch.optim.Optimizer
    world: World
    seed: int
    max_grad_norm: float | None
    tick: Callable[[], None]
    """Called before each micro-batch, to report progress to the watchdog."""

    @cached_property
    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.module.parameters() if parameter.requires_grad]

    def train_step(
        self, step: int, lr: float, batches: Sequence[Batch], first_micro: int, counts: TokenCounts
    ) -> StepResult:
        """The step's gradient is the mean over all its target tokens, whichever rank and micro-batch they are in.
        `first_micro` is the index of the first batch within the step."""
        parallel, uses_dropout = self.model.parallel, self.model.adapter.uses_dropout
        losses = []
        for index, batch in enumerate(batches):
            self.tick()
            inject_fault("forward", step + 1)
            # The dropout mask depends only on the position in the run, not on the rank.
            seed = derive_seed(self.seed, "dropout", step, first_micro + index) if uses_dropout else None
            with (
                seeded(seed) if seed is not None else nullcontext(),
                parallel.micro_step(is_last=index == len(batches) - 1),
            ):
                loss = self.model.loss(batch.to(self.world.device)) / counts.targets
                if inject_fault("loss", step + 1) == "nan":
                    loss = loss * float("nan")
                (loss * parallel.loss_scale).backward()  # type: ignore[no-untyped-call]
            parallel.after_backward()
            losses.append(loss.detach())
        parallel.finish_gradients()
        parallel.share_buffers()
        inject_fault("after_backward", step + 1)
        limit = self.max_grad_norm or float("inf")
        grad_norm = unshard(nn.utils.clip_grad_norm_(self._trainable, limit, foreach=True))
        set_schedule(self.optimizer, step, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        inject_fault("after_optimizer", step + 1)
        return StepResult(torch.stack(losses), grad_norm)
