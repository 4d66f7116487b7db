"""Splits the micro-batches of a step among the processes."""

from dataclasses import dataclass

from llmtrain.config.distributed import DistributedSection
from llmtrain.config.schema import Config
from llmtrain.errors import UsageError
from llmtrain.text import plural


@dataclass(frozen=True)
class MicroBatchRange:
    """The consecutive micro-batches of a step that one rank computes. Of 8, ranks 0, 1 and 2 of 3 have 0 to 2, 3 to 5,
    and 6 to 7."""

    first: int
    count: int
    rounds: int
    """Forward passes per step, the same on every rank: FSDP gathers weights in each. A rank with one micro-batch fewer
    computes one with zero weight."""

    @classmethod
    def of_rank(cls, rank: int, world_size: int, micro_batches: int) -> "MicroBatchRange":
        each, extra = divmod(micro_batches, world_size)
        return cls(rank * each + min(rank, extra), each + (rank < extra), each + (extra > 0))


def micro_batches_in_step(config: Config, world_size: int) -> int:
    """Fixed by the config; the number of processes only decides which rank computes which."""
    count = config.trainer.grad_accum_steps * (world_size if config.trainer.scale_batch else 1)
    is_power_of_two = world_size & (world_size - 1) == 0
    is_reproducible = config.distributed.reproducible_reduce
    if count < world_size and (is_power_of_two or not is_reproducible):
        raise _too_few(config, count, world_size)
    if is_reproducible and (not is_power_of_two or count % world_size):
        powers = [str(1 << n) for n in range(count.bit_length()) if count % (1 << n) == 0]
        fits = "1, 2, 4, 8, ..." if config.trainer.scale_batch else ", ".join(powers)
        raise UsageError(
            f"With distributed.reproducible_reduce the number of processes must be a power of two that divides the "
            f"{plural(count, 'micro-batch')} of a step (trainer.grad_accum_steps): {fits}; got {world_size}.",
            remedy="Start one of these numbers of processes, or set distributed.reproducible_reduce to false.",
        )
    if config.distributed.strategy == "fsdp" and config.trainer.optimizer == "adafactor" and world_size > 1:
        raise adafactor_with_fsdp()
    return count


def _too_few(config: Config, count: int, world_size: int) -> UsageError:
    sequences = count * config.trainer.micro_batch_size
    is_same = sequences % world_size == 0
    settings = f"--set trainer.grad_accum_steps={world_size}"
    settings += f" --set trainer.micro_batch_size={sequences // world_size}" if is_same else ""
    batch = "keeps the batch" if is_same else "makes the batch larger"
    return UsageError(
        f"A step has {plural(count, 'micro-batch')} (trainer.grad_accum_steps), too few for {world_size} "
        f"processes. The number of processes must be 1 to {count}.",
        remedy=f"Pass {settings}, which {batch}, or --set trainer.scale_batch=true for a step of "
        f"{count * world_size} micro-batches.",
    )


def adafactor_with_fsdp() -> UsageError:
    return UsageError(
        "trainer.optimizer adafactor does not support distributed.strategy fsdp.",
        remedy="Use adamw, whose state fsdp shards, or distributed.strategy ddp.",
    )


def check_power_of_two(distributed: DistributedSection, world_size: int) -> None:
    if distributed.reproducible_reduce and world_size & (world_size - 1):
        raise UsageError(
            f"With distributed.reproducible_reduce the number of processes must be a power of two, got {world_size}.",
            remedy="Start 1, 2, 4, 8, ... processes, or set distributed.reproducible_reduce to false.",
        )
