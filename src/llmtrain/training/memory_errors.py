"""Too little memory: refused before a model is built, and recognized among the errors of torch."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from llmtrain.config.model import HfCausalLmSection
from llmtrain.config.schema import Config
from llmtrain.config.trainer import training_bytes
from llmtrain.distributed.env import machine_memory
from llmtrain.distributed.world import World
from llmtrain.errors import UsageError
from llmtrain.models.base import ModelAdapter
from llmtrain.plugins import is_own
from llmtrain.text import format_bytes

_CPU = re.compile(r"DefaultCPUAllocator: (.*?you tried to allocate \d+ bytes)")


def check_memory(config: Config, adapter: ModelAdapter, world: World, is_dry_run: bool = False) -> None:
    """Refuse to train a model on a CPU whose memory cannot hold it, without activations. The kernel would end the
    process without a message: memory is allocated when it is written to."""
    count = adapter.weight_count() if world.device.type == "cpu" and not is_own(type(adapter)) else None
    if count is None:
        return
    section = adapter.config if isinstance(adapter.config, HfCausalLmSection) else None
    bytes_per_weight = 2 if section and section.dtype == "bfloat16" else 4
    need, what = bytes_per_weight * count, ""
    if not (is_dry_run or (section and section.lora)):
        optimizer = config.trainer.optimizer
        state = training_bytes(optimizer, count, matrices=count, bytes_per_weight=bytes_per_weight)
        shards = world.world_size if config.distributed.strategy == "fsdp" else 1
        need = max(need, (need + state) // shards)  # fsdp shards a whole model
        what = f", their gradients and the state of {optimizer}"
    need *= world.local_world_size
    memory = machine_memory()
    if need > memory:
        raise UsageError(
            f"The model does not fit in the memory of this machine: its {count:,} weights{what} need at least "
            f"{format_bytes(need)}, and there are {format_bytes(memory)}.",
            remedy="Choose a smaller model, or a machine with more memory.",
        )


@contextmanager
def explained(
    device: torch.device, remedy: str = "Choose a smaller model, or a machine with more memory."
) -> Iterator[None]:
    """A model that does not fit is a mistake of the user, not a failure."""
    try:
        yield
    except RuntimeError as problem:
        what = out_of_memory(problem)
        if what is None:
            raise
        raise UsageError(f"The model does not fit in the memory of {device}: {what}.", remedy=remedy) from None


def out_of_memory(problem: RuntimeError) -> str | None:
    """What torch says about the memory; None for any other error."""
    if isinstance(problem, torch.OutOfMemoryError):
        return str(problem).partition(". Of the")[0]
    found = _CPU.search(str(problem))
    return found.group(1) if found else None
