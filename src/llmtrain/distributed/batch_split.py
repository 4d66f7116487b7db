"""How the micro-batches of a step are shared among the processes."""

from dataclasses import dataclass

from llmtrain.config.distributed import DistributedSection
from llmtrain.config.schema import Config
from llmtrain.errors import UsageError


@dataclass(frozen=True)
class Share:
    """The micro-batches of a step that one rank computes: a whole stretch of them. Of 8, ranks 0, 1 and 2 of 3 have
    0 to 2, 3 to 5, and 6 to 7."""

    first: int
    count: int
    rounds: int
    """Forward passes of every rank in a step. A rank whose count is one less makes one that carries no weight: FSDP
    gathers weights in each, and needs everyone."""

    @classmethod
    def of_rank(cls, rank: int, world_size: int, micro_batches: int) -> "Share":
        each, extra = divmod(micro_batches, world_size)
        return cls(rank * each + min(rank, extra), each + (rank < extra), each + (extra > 0))


def micro_batches_in_step(config: Config, world_size: int) -> int:
    """Fixed by the config; the number of processes only decides who computes which."""
    count = config.trainer.grad_accum_steps * (world_size if config.trainer.scale_batch else 1)
    if config.distributed.reproducible_reduce and (world_size & (world_size - 1) or count % world_size):
        powers = [str(1 << n) for n in range(count.bit_length()) if count % (1 << n) == 0]
        fits = "1, 2, 4, 8, ..." if config.trainer.scale_batch else ", ".join(powers)
        raise UsageError(
            f"distributed.reproducible_reduce needs a power of two that divides the {count} micro-batches of a step "
            f"(trainer.grad_accum_steps); there are {world_size} processes. Numbers that fit: {fits}.",
            remedy="Start one of those, or set distributed.reproducible_reduce to false.",
        )
    if count < world_size:
        raise UsageError(
            f"A step has {count} micro-batches (trainer.grad_accum_steps) for {world_size} processes: "
            f"{world_size - count} would have nothing to do. Numbers that fit: 1 to {count}.",
            remedy=f"Set trainer.grad_accum_steps to {world_size} or more; or set trainer.scale_batch to true, which "
            f"makes it {count * world_size} micro-batches, a larger step.",
        )
    if config.distributed.strategy == "fsdp" and config.trainer.optimizer == "adafactor" and world_size > 1:
        raise adafactor_with_fsdp()
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
