"""How a step is shared: the arithmetic between the config and the number of processes."""

from llmtrain.config.schema import Config, DistributedSection
from llmtrain.errors import UsageError


def micro_batches_in_step(config: Config, world_size: int) -> int:
    """Fixed by the config; the number of processes only decides who computes which."""
    count = config.trainer.grad_accum_steps * (world_size if config.trainer.scale_batch else 1)
    if count % world_size:
        fits = [size for size in range(1, count + 1) if count % size == 0]
        below = count - count % world_size
        near = " or ".join(str(n) for n in (below, below + world_size) if n)
        raise UsageError(
            f"{world_size} processes cannot share the {count} micro-batches of a step (trainer.grad_accum_steps). "
            f"Numbers of processes that fit: {', '.join(map(str, fits))}.",
            remedy=f"Set trainer.grad_accum_steps to a multiple of {world_size}, such as {near}; or set "
            f"trainer.scale_batch to true, which makes it {count * world_size} micro-batches, a larger step.",
        )
    if config.distributed.strategy == "fsdp" and config.trainer.optimizer == "adafactor" and world_size > 1:
        raise adafactor_with_fsdp()
    check_power_of_two(config.distributed, world_size)
    return count


def adafactor_with_fsdp() -> UsageError:
    return UsageError(
        "trainer.optimizer adafactor does not work on the sharded tensors of distributed.strategy fsdp.",
        remedy="Use adamw, whose averages fsdp shards, or distributed.strategy ddp.",
    )


def check_power_of_two(distributed: DistributedSection, world_size: int) -> None:
    if distributed.reproducible_reduce and world_size & (world_size - 1):
        raise UsageError(
            f"distributed.reproducible_reduce needs 1, 2, 4, 8, ... processes; there are {world_size}.",
            remedy="Start another number of them, or set distributed.reproducible_reduce to false.",
        )
