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
from llmtrain.config.trainer import BF16_ACTIVATIONS
from llmtrain.core.text import first_names
from llmtrain.distributed.deterministic_reduce import GradientTree
from llmtrain.distributed.world import World
from llmtrain.errors import UsageError


class ParallelModel:
    """A model on one process; subclasses add communication in the hooks of a training step."""

    loss_scale = 1.0
    is_sharded = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._shared_buffers: list[str] = []
        if dist.is_initialized():
            stored = module.state_dict().keys()
            self._shared_buffers = [name for name, _ in module.named_buffers() if name in stored]

    def micro_step(self, is_last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Context of the forward and backward pass of one micro-batch; `is_last`: of the step."""
        return nullcontext()

    def after_backward(self) -> None:
        """Called after the backward pass of each micro-batch."""

    def finish_gradients(self) -> None:
        """Called after the last micro-batch; afterwards gradients are those of the whole step."""

    def without_gradient(self) -> list[nn.Parameter]:
        """Trained parameters that got no gradient in this step. Called after finish_gradients."""
        return [p for p in self.module.parameters() if p.requires_grad and p.grad is None]

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

    def without_gradient(self) -> list[nn.Parameter]:
        return self._tree.without_gradient


class DDPModel(ParallelModel):
    def __init__(self, module: nn.Module, world: World, find_unused_parameters: bool) -> None:
        from torch.nn.parallel import DistributedDataParallel

        # share_buffers is called once per step. Newer versions of torch renamed the option.
        names = inspect.signature(DistributedDataParallel.__init__).parameters
        sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        options: dict[str, Any] = {sync_buffers: False}
        if world.device.type == "cuda":
            options["device_ids"] = [world.device]
        self._ddp = DistributedDataParallel(
            module,
            **options,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused_parameters,
        )
        super().__init__(self._ddp)
        self.loss_scale = float(world.world_size)

    def micro_step(self, is_last: bool) -> AbstractContextManager[Any]:
        if is_last:
            return nullcontext()
        return self._ddp.no_sync()  # gradients are exchanged once per step

    def finish_gradients(self) -> None:
        """Refuse gradients that DDP has not exchanged, because it waited for those of all parameters. torch itself
        raises in the next forward pass, after the optimizer has used them."""
        try:
            self._ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError:
            unused = [name for name, p in self._ddp.module.named_parameters() if p.requires_grad and p.grad is None]
            names = ""
            if unused:  # else they have the gradients of earlier micro-batches of this step
                names = f": {first_names(unused)}"
            raise UsageError(
                "DDP waits for the gradients of all parameters in the last micro-batch of a step. Some trained "
                f"parameters got none there, although the first sequence of the run reached all of them{names}.",
                remedy="Set distributed.find_unused_parameters to true and resume.",
            ) from None


class FSDPModel(ParallelModel):
    """Each block is one FSDP unit: its weights are gathered for its forward and backward pass and freed afterwards."""

    is_sharded = True

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], world: World, precision: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(world.device.type, (world.world_size,))
        # Weights are gathered and computed with in bfloat16; gradients are reduced, and weights stored, in float32.
        policy = MixedPrecisionPolicy()
        if precision in BF16_ACTIVATIONS:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in blocks:  # before the module: it gets the parameters that are in no block
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
    find_unused_parameters: bool = False,
) -> ParallelModel:
    """`micro_batches`: per step, of all processes together. `find_unused_parameters`: whether DDP searches for them."""
    if config.reproducible_reduce:
        return DeterministicModel(module, world, micro_batches)
    if is_sharding(config, world):
        return FSDPModel(module, blocks(module), world, precision)
    if uses_ddp(config, world):
        return DDPModel(module, world, find_unused_parameters)
    return ParallelModel(module)


def uses_ddp(config: DistributedSection, world: World) -> bool:
    """Whether torch's DDP exchanges the gradients. With reproducible_reduce our own code does."""
    return world.is_joined and config.strategy == "ddp" and not config.reproducible_reduce


def is_sharding(config: DistributedSection, world: World) -> bool:
    """Whether each process holds a shard of the model."""
    return world.is_joined and config.strategy == "fsdp"


def unshard(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a sharded one (a collective: every rank must call it); any other tensor unchanged."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full
