"""Parallelism (none, ddp, fsdp), applied to a model from outside: model code never mentions ranks.

The loss of a step is a sum over its targets divided by their number on all ranks, so gradients must be summed. DDP and
FSDP average over ranks instead; scaling the loss by the world size undoes that.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from llmtrain.config.distributed import DistributedSection
from llmtrain.distributed.deterministic_reduce import GradientTree
from llmtrain.distributed.world import World


class ParallelModel:
    """A model on one process; subclasses add communication in the hooks of a training step."""

    loss_scale = 1.0
    is_sharded = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        stored = module.state_dict().keys() if dist.is_initialized() else {}
        self._shared_buffers = [name for name, _ in module.named_buffers() if name in stored]

    def micro_step(self, is_last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Context of the forward and backward pass of one micro-batch; `is_last`: of the step."""
        return nullcontext()

    def after_backward(self) -> None:
        """Called after the backward pass of each micro-batch."""

    def finish_gradients(self) -> None:
        """Called after the last micro-batch; afterwards gradients are those of the whole step."""

    def share_buffers(self) -> None:
        """Give all ranks the buffers of rank 0 that are stored in checkpoints, such as the statistics of a batch norm.
        Our own models have none."""
        for name in self._shared_buffers:
            dist.broadcast(self.module.get_buffer(name), src=0)


class DeterministicModel(ParallelModel):
    """Sums gradients in a fixed order, the same on any number of processes."""

    def __init__(self, module: nn.Module, world: World, micro_batches: int) -> None:
        super().__init__(module)
        self._tree = GradientTree(module, world.rank, world.world_size, micro_batches)

    def after_backward(self) -> None:
        self._tree.add_micro_batch()

    def finish_gradients(self) -> None:
        self._tree.finish()


class DDPModel(ParallelModel):
    def __init__(self, module: nn.Module, world: World, config: DistributedSection) -> None:
        from torch.nn.parallel import DistributedDataParallel

        # share_buffers is called once per step. Newer versions of torch renamed the option.
        names = inspect.signature(DistributedDataParallel.__init__).parameters
        sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        options: dict[str, Any] = {sync_buffers: False}
        self._ddp = DistributedDataParallel(
            module,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            **options,
            gradient_as_bucket_view=True,
            find_unused_parameters=config.find_unused_parameters,
        )
        super().__init__(self._ddp)
        self.loss_scale = float(world.world_size)

    def micro_step(self, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if is_last else self._ddp.no_sync()


class FSDPModel(ParallelModel):
    """Each block is one FSDP unit: its weights are gathered for its forward and backward pass and freed afterwards."""

    is_sharded = True

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], world: World, precision: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(world.device.type, (world.world_size,))
        # Weights are gathered and computed with in bfloat16; gradients are reduced, and weights stored, in float32.
        low = torch.bfloat16 if precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        super().__init__(module)
        self.loss_scale = float(world.world_size)


def parallelize(
    module: nn.Module,
    blocks: Callable[[nn.Module], Sequence[nn.Module]],
    config: DistributedSection,
    world: World,
    precision: str,
    micro_batches: int,
) -> ParallelModel:
    """`micro_batches`: per step, of all processes together."""
    if config.reproducible_reduce:
        return DeterministicModel(module, world, micro_batches)
    if not world.is_joined or config.strategy == "none":
        return ParallelModel(module)
    if is_sharding(config, world):
        return FSDPModel(module, blocks(module), world, precision)
    return DDPModel(module, world, config)


def is_sharding(config: DistributedSection, world: World) -> bool:
    """Whether each process holds a shard of the model."""
    return world.is_joined and config.strategy == "fsdp"


def unshard(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a sharded one (a collective: every rank must call it); any other tensor unchanged."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full
