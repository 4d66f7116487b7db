"""Splits the micro-batches of a step among the processes."""

from dataclasses import dataclass

from llmtrain.config.distributed import DistributedSection
from llmtrain.config.trainer import TrainerSection
from llmtrain.core.text import plural
from llmtrain.errors import UsageError


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
        first = rank * each + min(rank, extra)
        count = each
        if rank < extra:  # the first ranks share the remainder
            count += 1
        rounds = each
        if extra:
            rounds += 1
        return cls(first, count, rounds)


def micro_batches_in_step(trainer: TrainerSection, distributed: DistributedSection, world_size: int) -> int:
    """The micro-batches of a step. UsageError if `world_size` processes cannot share them as the config requires.

    Without trainer.scale_batch their number is fixed by the config, and the number of processes only decides which rank
    computes which."""
    count = trainer.grad_accum_steps
    if trainer.scale_batch:
        count *= world_size
    is_reproducible = distributed.reproducible_reduce
    if count < world_size and (_is_power_of_two(world_size) or not is_reproducible):
        raise _too_few(trainer, count, world_size)
    if is_reproducible and (not _is_power_of_two(world_size) or count % world_size):
        fits = "1, 2, 4, 8, ..."
        if not trainer.scale_batch:
            fits = ", ".join(map(str, _powers_of_two_in(count)))
        raise UsageError(
            f"With distributed.reproducible_reduce the number of processes must be a power of two that divides the "
            f"{plural(count, 'micro-batch')} of a step (trainer.grad_accum_steps): {fits}; got {world_size}.",
            remedy="Start one of these numbers of processes, or set distributed.reproducible_reduce to false.",
        )
    if distributed.strategy == "fsdp" and trainer.optimizer == "adafactor" and world_size > 1:
        raise adafactor_with_fsdp()
    return count


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _powers_of_two_in(count: int) -> list[int]:
    """The powers of two that divide a number above 0."""
    powers = [1]
    while count % (2 * powers[-1]) == 0:
        powers.append(2 * powers[-1])
    return powers


def _too_few(trainer: TrainerSection, count: int, world_size: int) -> UsageError:
    settings = f"--set trainer.grad_accum_steps={world_size}"
    batch = "makes the batch larger"
    sequences = count * trainer.micro_batch_size
    if sequences % world_size == 0:
        settings += f" --set trainer.micro_batch_size={sequences // world_size}"
        batch = "keeps the batch"
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
    if distributed.reproducible_reduce and not _is_power_of_two(world_size):
        raise UsageError(
            f"With distributed.reproducible_reduce the number of processes must be a power of two, got {world_size}.",
            remedy="Start 1, 2, 4, 8, ... processes, or set distributed.reproducible_reduce to false.",
        )
