"""The handle through which every step of a run uses the model."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from llmtrain.config.distributed import DistributedSection
from llmtrain.config.trainer import TrainerSection
from llmtrain.data.batches import Batch
from llmtrain.distributed.batch_split import adafactor_with_fsdp
from llmtrain.distributed.parallel import ParallelModel, is_sharding, parallelize, uses_ddp
from llmtrain.distributed.world import World
from llmtrain.errors import UsageError
from llmtrain.models.activation_checkpointing import checkpoint_blocks
from llmtrain.models.base import GroupLossFunction, LossFunction, ModelAdapter
from llmtrain.models.device_precision import Autocast, autocast_for, compute_precision
from llmtrain.models.group_losses import Groups
from llmtrain.training.components import Components
from llmtrain.training.objectives.base import Objective
from llmtrain.training.unused_parameters import unused_parameters


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
    objective: Objective
    group_loss_function: GroupLossFunction
    """Compiled like loss_function."""

    def loss(self, batch: Batch) -> torch.Tensor:
        """Sum of the loss over the target tokens of a batch."""
        with self.autocast():
            return self.loss_function(self.parallel.module, batch.inputs, batch.targets, batch.positions)

    def group_losses(self, batch: Batch, groups: Groups) -> torch.Tensor:
        """Sum of the loss over the target tokens of each group."""
        with self.autocast():
            module = self.parallel.module
            return self.group_loss_function(module, batch.inputs, batch.targets, batch.positions, groups)


def build_model(
    components: Components, trainer: TrainerSection, distributed: DistributedSection, world: World
) -> ModelHandle:
    """Parallelize the model and, if trainer.compile is set, compile its loss."""
    adapter = components.adapter
    module = components.module
    is_sharded = is_sharding(distributed, world)
    if is_sharded and trainer.optimizer == "adafactor":  # also in a world of one process
        raise adafactor_with_fsdp()
    checkpoint_activations(adapter, module, trainer)
    objective = components.objective
    loss_function: LossFunction = adapter.loss
    group_loss_function: GroupLossFunction = adapter.group_losses
    if trainer.compile and objective.compares_answers:
        group_loss_function = adapter.compiled_group_losses(module)
    elif trainer.compile:
        is_by_block = is_sharded or components.recorded["compiled"] == "blocks"
        loss_function = adapter.compiled_loss(module, is_by_block)
    autocast = autocast_for(trainer, adapter, world.device)
    parallel = parallelize(
        module,
        adapter.blocks,
        distributed,
        world,
        compute_precision(trainer, world.device),
        components.micro_batches,
        find_unused_parameters=_has_unused_parameters(components, autocast, distributed, world),
    )
    return ModelHandle(adapter, module, parallel, loss_function, autocast, objective, group_loss_function)


def unparallel_handle(components: Components) -> ModelHandle:
    """The model as it is, for a single forward pass. The caller sets autocast."""
    adapter = components.adapter
    module = components.module
    parallel = ParallelModel(module)
    return ModelHandle(adapter, module, parallel, adapter.loss, nullcontext, components.objective, adapter.group_losses)


def checkpoint_activations(adapter: ModelAdapter, module: nn.Module, trainer: TrainerSection) -> None:
    kind = trainer.activation_checkpointing
    if kind == "none":
        return
    blocks = adapter.blocks(module)
    if not blocks:
        raise UsageError(
            f"trainer.activation_checkpointing is {kind}, but model {adapter.config.name} has no transformer blocks.",
            remedy="Set trainer.activation_checkpointing to none.",
        )
    checkpoint_blocks(blocks, is_selective=kind == "selective", has_dropout=adapter.uses_dropout)


def _has_unused_parameters(
    components: Components, autocast: Autocast, distributed: DistributedSection, world: World
) -> bool:
    """Whether DDP has to search for unused parameters in every step, which takes time. All ranks must agree."""
    if not uses_ddp(distributed, world) or distributed.find_unused_parameters:
        return distributed.find_unused_parameters
    batch = components.train_batches[0].to(world.device)
    with autocast():
        unused = unused_parameters(components.adapter, components.module, batch)
    return world.control.any(bool(unused))
