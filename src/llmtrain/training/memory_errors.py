"""Too little memory: refused before it is allocated, and recognized among the errors of torch."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from llmtrain.config.distributed import DistributedSection
from llmtrain.config.model import HfCausalLmSection
from llmtrain.config.schema import Config
from llmtrain.config.trainer import TrainerSection
from llmtrain.core.text import format_bytes
from llmtrain.distributed.machine_limits import machine_memory
from llmtrain.distributed.world import World
from llmtrain.errors import UsageError
from llmtrain.models.base import ModelAdapter
from llmtrain.plan.plan import with_vocabulary
from llmtrain.plan.states import training_bytes
from llmtrain.plan.target import Target
from llmtrain.plugins import is_plugin_class
from llmtrain.training.random_state import preserved

MICRO_BATCH = "trainer.micro_batch_size"
KEEP_STEP = ", and raise trainer.grad_accum_steps to keep the tokens per step"
BATCH_BYTES_PER_TOKEN = 16
"""Inputs and targets as int64."""
BYTES_PER_FEATURE = 16
"""Four float32 values per input and output of a layer: more than twice what a step of a GPT needs."""
CERTAIN_SHARE = 0.25
"""Of the memory: what needs less by a crude upper bound is not examined further."""
_CPU = re.compile(r"DefaultCPUAllocator: (.*?you tried to allocate \d+ bytes)")


def check_memory(
    trainer: TrainerSection,
    distributed: DistributedSection,
    adapter: ModelAdapter,
    world: World,
    is_dry_run: bool = False,
) -> None:
    """Refuse to train a model on a CPU whose memory cannot hold it, without activations. The kernel would end the
    process without a message: memory is allocated when it is written to."""
    if world.device.type != "cpu" or is_plugin_class(type(adapter)):
        return
    count = adapter.weight_count()
    if count is None:
        return
    bytes_per_weight = 4
    trains_all_weights = not is_dry_run
    section = adapter.config
    if isinstance(section, HfCausalLmSection):
        if section.dtype == "bfloat16":
            bytes_per_weight = 2
        if section.lora:
            trains_all_weights = False
    need = bytes_per_weight * count
    what = ""
    if trains_all_weights:
        state = training_bytes(trainer.optimizer, count, matrices=count, element_size=bytes_per_weight)
        shards = world.world_size if distributed.strategy == "fsdp" else 1
        need = max(need, (need + state) // shards)  # fsdp shards a whole model
        what = f", their gradients and the state of {trainer.optimizer}"
    need *= world.local_world_size
    memory = machine_memory()
    if need > memory:
        raise UsageError(
            f"The model does not fit in the memory of this machine: its {count:,} weights{what} need at least "
            f"{format_bytes(need)}, and there are {format_bytes(memory)}.",
            remedy="Choose a smaller model, or a machine with more memory.",
        )


def check_batch_memory(sequences: int, tokens: int, processes: int, option: str = MICRO_BATCH) -> None:
    """Refuse a batch whose token ids do not fit in the memory of this machine, also if the model is on a GPU."""
    memory = machine_memory()
    need = processes * sequences * tokens * BATCH_BYTES_PER_TOKEN
    if need > memory:
        keep_step = KEEP_STEP if option == MICRO_BATCH else ""
        raise _batch_too_large(sequences, tokens, processes, need, memory, f"Lower {option}{keep_step}.")


def check_activation_memory(
    config: Config,
    adapter: ModelAdapter,
    module: nn.Module,
    shape: tuple[int, int],
    world: World,
    is_dry_run: bool = False,
) -> None:
    """Refuse a micro-batch (sequences, tokens) with which a step certainly does not fit in the memory of a CPU. A model
    that cannot be traced is not refused."""
    if world.device.type != "cpu":
        return
    memory = machine_memory()
    sequences, tokens = shape
    processes = world.local_world_size
    states = 4 * sum(parameter.nbytes for parameter in module.parameters())  # gradients, and two averages
    most = processes * (states + _most_activation_bytes(module, sequences * tokens))
    if most < CERTAIN_SHARE * memory:
        return  # tracing takes seconds
    from llmtrain.plan.micro_batch import check_micro_batch

    target = Target("cpu", memory, None, max(1, world.world_size // processes), processes)
    with preserved():
        found = check_micro_batch(with_vocabulary(config, adapter.vocab_size), target, shape, has_states=not is_dry_run)
    if found is None:
        return
    remedy = f"Lower {MICRO_BATCH}{KEEP_STEP}."
    if found.largest == 0:
        remedy = "Lower model.block_size, or choose a smaller model."
    elif found.largest is not None:
        remedy = f"Lower {MICRO_BATCH} to {found.largest:,}{KEEP_STEP}."
    raise _batch_too_large(sequences, tokens, processes, found.need_bytes, memory, remedy)


def _most_activation_bytes(module: nn.Module, tokens: int) -> int:
    """A crude upper bound of what a step needs, from the sizes of the layers. It takes no time."""
    features = 0
    for parameter in module.parameters():
        if parameter.dim() < 2:
            features += 2 * parameter.numel()
        else:
            features += len(parameter) + parameter.numel() // max(1, len(parameter))
    return BYTES_PER_FEATURE * features * tokens


def _batch_too_large(sequences: int, tokens: int, processes: int, need: int, memory: int, remedy: str) -> UsageError:
    in_processes = f" in {processes} processes" if processes > 1 else ""
    return UsageError(
        f"A batch of {sequences:,} sequences of {tokens:,} tokens does not fit in the memory of this machine: it needs "
        f"at least {format_bytes(need)}{in_processes}, and there are {format_bytes(memory)}.",
        remedy=remedy,
    )


@contextmanager
def explained(
    device: torch.device, remedy: str = "Choose a smaller model, or a machine with more memory."
) -> Iterator[None]:
    """Raise UsageError if the model does not fit in memory."""
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
