"""Memory that a config needs, from the number of parameters, which is counted on the meta device."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmtrain import registry
from llmtrain.config.model import AnyGptSection, HfCausalLmSection, ModelSection
from llmtrain.config.schema import Config
from llmtrain.config.trainer import training_bytes
from llmtrain.distributed.env import machine_memory
from llmtrain.doctor.machine import uses_gpu
from llmtrain.errors import LlmtrainError
from llmtrain.findings import Finding, failed, failed_by, passed, warned
from llmtrain.text import format_bytes, one_line

CHEAP_VOCABULARIES = {"byte": 256, "gpt2": 50257}
WARN_FRACTION = 0.8


@dataclass(frozen=True)
class Count:
    parameters: int | None = None
    trained: int = 0
    weight_bytes: int = 0
    matrices: int = 0
    """Of the trained weights, those that muon orthogonalizes."""
    bytes_per_trained_weight: int = 4
    unknown_because: str = ""
    problem: LlmtrainError | None = None
    """Why the model cannot be built from the config."""


def count_parameters(config: Config) -> Count:
    """Build the model on torch's meta device, where tensors have no data."""
    import torch

    from llmtrain.models.base import block_matrices, parameter_count, trainable_count
    from llmtrain.models.device_precision import with_device_precision

    device = torch.device("cuda" if uses_gpu(config) else "cpu")
    section: ModelSection = with_device_precision(config, device).model
    if isinstance(section, AnyGptSection):
        section = section.model_copy(update={"init": "random"})  # has the same size, and reads no file
    tokenizer = config.data.tokenizer or "byte"
    vocabulary = CHEAP_VOCABULARIES.get(tokenizer, getattr(section, "vocab_size", None))
    if isinstance(section, HfCausalLmSection):
        vocabulary = 0  # the model has its own
        if not Path(section.path).expanduser().is_dir():
            return Count(unknown_because=f"{section.path} is on the hub, and is not downloaded for this check")
    if vocabulary is None:
        return Count(unknown_because=f"the vocabulary of tokenizer '{tokenizer}' depends on the text")
    try:
        adapter = registry.resolve("model.name", section.name, registry.MODELS)(section, vocabulary)
        with torch.device("meta"):
            module = adapter.build_empty()
        total, trained = parameter_count(module), trainable_count(module)
        frozen_bytes, trained_bytes = 4.0, 4
        if isinstance(section, HfCausalLmSection):
            trained_bytes = section.bytes_per_trained_weight
            frozen_bytes = 2.0 if section.dtype == "bfloat16" else 4.0
            if section.lora and section.lora.quantize:
                frozen_bytes = 0.55  # 4 bits and their scales
        matrices = sum(parameter.numel() for parameter in block_matrices(adapter, module).values())
        weight_bytes = trained_bytes * trained + int(frozen_bytes * (total - trained))
        return Count(total, trained, weight_bytes, matrices, trained_bytes)
    except LlmtrainError as error:
        return Count(problem=error)
    except Exception as problem:  # other models may not support the meta device
        return Count(unknown_because=f"{type(problem).__name__}: {one_line(problem, 200)}")


def checkpoint_bytes(config: Config, count: Count) -> int | None:
    """The trained weights and the averages of the optimizer."""
    if count.parameters is None:
        return None
    return training_bytes_of(config, count)  # as many, with weights in the place of gradients


def training_bytes_of(config: Config, count: Count) -> int:
    return training_bytes(config.trainer.optimizer, count.trained, count.matrices, count.bytes_per_trained_weight)


def memory(config: Config, count: Count, world_size: int, processes: int) -> Iterator[Finding]:
    """Memory of the machine, shared by its processes; with GPUs, of one GPU for one process."""
    is_gpu, limit = memory_limit(config)
    if count.problem is not None:
        yield failed_by("memory", count.problem)
        return
    owner = "of each GPU" if is_gpu else "of this machine or container"
    if count.parameters is None:
        yield passed("memory", f"{format_bytes(limit)} {owner}; requirement unknown: {count.unknown_because}")
        return
    optimizer, strategy = config.trainer.optimizer, config.distributed.strategy
    shards = world_size if strategy == "fsdp" else 1
    need = (count.weight_bytes + training_bytes_of(config, count)) // shards * (1 if is_gpu else processes)
    evidence = (
        f"{count.parameters:,} parameters need {format_bytes(need)} "
        + (f"in {processes} processes " if processes > 1 and not is_gpu else "")
        + f"for weights, gradients and {optimizer} (plus activations), of {format_bytes(limit)} {owner}"
    )
    remedy = "Use a smaller model, trainer.optimizer adafactor, or distributed.strategy fsdp on more nodes or GPUs."
    if need > limit:
        yield failed("memory", evidence, remedy)
    elif need > WARN_FRACTION * limit:
        yield warned("memory", evidence, remedy)
    else:
        yield passed("memory", evidence)


def memory_limit(config: Config) -> tuple[bool, int]:
    """(whether it is GPU memory, bytes)"""
    import torch

    if uses_gpu(config):
        return True, min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    return False, machine_memory()
