"""none | ddp | fsdp, applied to a finished model from outside: a model never mentions ranks.

A step's loss is a sum over all its targets divided by their number on all ranks, so gradients must be added up.
DDP and FSDP take the mean over ranks instead, which is undone by scaling the loss by the number of ranks.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from llmtrain.config.distributed import DistributedSection
from llmtrain.distributed.deterministic_reduce import GradientTree
from llmtrain.distributed.world import World


class ParallelModel:
    """One process, and the contract of the others: what to call instead of the model, and what to do around it."""

    loss_scale = 1.0
    is_sharded = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def micro_step(self, is_last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Around forward and backward of one micro-batch; `is_last` of the step."""
        return nullcontext()

    def after_backward(self) -> None:
        """After the backward pass of one micro-batch."""

    def finish_gradients(self) -> None:
        """After all of them: from here on the gradients are those of the whole step."""


class DeterministicModel(ParallelModel):
    """The model as it is; gradients are summed in a fixed order, by one process or by several."""

    def __init__(self, module: nn.Module, world: World, micro_batches: int) -> None:
        super().__init__(module)
        self._tree = GradientTree(module, world.rank, world.world_size, micro_batches)

    def after_backward(self) -> None:
        self._tree.take()

    def finish_gradients(self) -> None:
        self._tree.finish()


class DDPModel(ParallelModel):
    def __init__(self, module: nn.Module, world: World, config: DistributedSection) -> None:
        from torch.nn.parallel import DistributedDataParallel

        # Buffers here are constants: not sent again at every forward pass. Newer versions of torch renamed the switch.
        names = inspect.signature(DistributedDataParallel.__init__).parameters
        switch = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        options: dict[str, Any] = {switch: False}
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
    """Every block is a unit of its own: its weights are gathered when it runs and let go afterwards."""

    is_sharded = True

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], world: World, precision: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(world.device.type, (world.world_size,))
        # Weights travel and compute in bfloat16; gradients are summed, and weights kept, in float32.
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
    """`micro_batches` is the number in a step, of all processes together."""
    if config.reproducible_reduce:
        return DeterministicModel(module, world, micro_batches)
    if not world.is_joined or config.strategy == "none":
        return ParallelModel(module)
    if is_sharding(config, world):
        return FSDPModel(module, blocks(module), world, precision)
    return DDPModel(module, world, config)


def is_sharding(config: DistributedSection, world: World) -> bool:
    """Whether each process gets a slice of the model; one that joined nobody keeps it whole."""
    return world.is_joined and config.strategy == "fsdp"


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor put together (every rank has to ask for it); any other as it is."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full
