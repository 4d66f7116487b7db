"""Data and model of a run, built and checked before anything is written."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmtrain import registry
from llmtrain.compat.numerics import Numerics
from llmtrain.config.check_plugins import describe_plugins
from llmtrain.config.distributed import DistributedSection
from llmtrain.config.model import HfCausalLmSection, ModelSection
from llmtrain.config.objective import ObjectiveSection
from llmtrain.config.schema import Config
from llmtrain.config.trainer import TrainerSection
from llmtrain.core.fault_injection import inject_fault
from llmtrain.core.logs import warn
from llmtrain.core.progress import phase
from llmtrain.core.redact import redact_values
from llmtrain.core.seeds import derive_seed
from llmtrain.data.base import PreparedData, PreparedMixture
from llmtrain.data.batches import Batch, EvalBatches, TrainBatches
from llmtrain.data.content_hash import files_sha256
from llmtrain.data.make_batches import least_width, make_batches
from llmtrain.data.open_data import open_data
from llmtrain.distributed.batch_split import micro_batches_in_step
from llmtrain.distributed.parallel import is_sharding
from llmtrain.distributed.world import World
from llmtrain.errors import UsageError
from llmtrain.models.base import ModelAdapter, block_matrices, build_checked, evaluating, trainable_count
from llmtrain.models.compute_dtype import compute_in
from llmtrain.models.device_precision import autocast_for, cast_dtype, compute_precision, with_device_precision
from llmtrain.models.fp8 import check_fp8_device, use_fp8
from llmtrain.plugins import is_plugin_class, plugin_errors, wrong_result
from llmtrain.runs.metadata import cpu_architecture, versions
from llmtrain.tracking.open import check_trackers
from llmtrain.training.compilation import compiled_parts
from llmtrain.training.memory_errors import check_activation_memory, check_batch_memory, check_memory, explained
from llmtrain.training.objectives.base import Objective
from llmtrain.training.random_state import preserved, seeded
from llmtrain.training.schedule import max_steps_of
from llmtrain.training.tasks.task_set import TaskSet, load_eval_tasks
from llmtrain.training.torch_settings import set_up_torch

GPU_ATTENTION = ("flash_attention_2", "flex_attention")
"""Values of model.attention that require a GPU."""


@dataclass(frozen=True)
class Components:
    """Data and model of a run."""

    prepared: PreparedData | PreparedMixture
    adapter: ModelAdapter
    train_batches: TrainBatches
    eval_batches: EvalBatches
    module: nn.Module
    """Not yet parallelized: the steps of a run use a ModelHandle."""
    objective: Objective
    micro_batches: int
    """Per step, over all processes."""
    recorded: dict[str, Any]
    """What a checkpoint records besides tensors and progress: config, data fingerprint, versions."""
    tasks: TaskSet | None
    """Those of trainer.eval_tasks, with their data."""


def build_on_all_ranks(config: Config, world: World, numerics: Numerics) -> Components:
    """Data and model, the same on every rank."""
    phase("reading data")
    inject_fault("prepare", 0)
    set_up_torch(config.run)
    components = world.control.all_or_none(lambda: build_components(config, world, numerics))
    _check_same_on_all_ranks(components, world)
    cache_dir = config.data.cache_dir
    components.recorded["base_sha256"] = world.control.on_rank0(lambda: base_sha256(components.adapter, cache_dir))
    return components


def build_components(
    config: Config, world: World, numerics: Numerics | None = None, is_dry_run: bool = False
) -> Components:
    """Data and model. Problems with either are raised here, before the run directory exists. `numerics`: those of the
    run that is resumed; a new run has the latest."""
    trainer = config.trainer
    micro_batches = micro_batches_in_step(trainer, config.distributed, world.world_size)
    check_trackers(config.tracking)
    _check_attention(config.model, world.device)
    if trainer.precision == "fp8":
        _check_fp8(numerics, world.device)
    on_device = with_device_precision(config, world.device)
    if on_device != config and world.is_first:
        warn("TRAIN", "this CPU has no bfloat16 instructions: computing in float32, which is faster here")

    # Data, and the model without its weights
    assert config.run.threads
    objective = build_objective(trainer.objective)
    prepared = open_data(config.data, config.model, config.run.seed).prepare(config.run.threads)
    for prompt in trainer.eval_prompts:
        prepared.tokenizer.encode(prompt)  # raises for characters that are not in the vocabulary
    tasks = load_eval_tasks(trainer, config.data)
    phase("building the model")
    adapter = build_adapter(on_device.model, prepared.tokenizer.vocab_size, numerics)

    # Batches
    check_batch_memory(trainer.micro_batch_size, least_width(config.model.block_size), world.local_world_size)
    train_batches, eval_batches = make_batches(
        prepared,
        config.data,
        block_size=config.model.block_size,
        micro_batch_size=trainer.micro_batch_size,
        micro_batches=micro_batches,
        seed=config.run.seed,
        vocab_size=adapter.vocab_size,
        eval_limit=trainer.eval_batches,
        can_pack=adapter.can_pack,
    )
    check_batch_memory(*train_batches.first_shape(), world.local_world_size)
    check_batch_memory(*eval_batches.largest_shape(), world.local_world_size)
    first = train_batches[0]  # raises if the token store is damaged
    if objective.compares_answers and first.pairs is None:
        raise UsageError(
            f"trainer.objective {trainer.objective.name} compares pairs of answers, and data.name {config.data.name} "
            "has none.",
            remedy="Set data.name to preference_jsonl.",
        )

    # The model's weights, and what can be checked only with them
    adapter.prepare_for(world.device, is_packed=first.positions is not None)
    check_memory(trainer, config.distributed, adapter, world, is_dry_run)
    with explained(world.device):
        module = build_module(adapter, trainer, config.distributed, config.run.seed, world)
    if trainer.optimizer == "muon":
        _check_matrices(adapter, module)
    with explained(world.device), autocast_for(trainer, adapter, world.device)():
        if is_plugin_class(type(adapter)) and not is_sharding(config.distributed, world):  # else it is on the CPU still
            _check_plugin(adapter, module, first.to(world.device))
        adapter.probe(module)
        _check_packing(adapter, module, first, "data.document_mask" if prepared.is_text else "data.packing")
    check_activation_memory(config, adapter, module, train_batches.first_shape(), world, is_dry_run)
    recorded = resume_fingerprint(config, prepared, adapter, world, micro_batches)
    recorded["compiled"] = compiled_parts(adapter, trainer, max_steps_of(trainer, train_batches) or 0)
    return Components(prepared, adapter, train_batches, eval_batches, module, objective, micro_batches, recorded, tasks)


def _check_attention(model: ModelSection, device: torch.device) -> None:
    """Refuse attention that this device cannot have; Config.problems has what no device can."""
    if isinstance(model, HfCausalLmSection) and model.attention in GPU_ATTENTION and device.type == "cpu":
        raise UsageError(
            f"model.attention {model.attention} needs a GPU.", remedy="Set model.attention to sdpa or eager."
        )


def _check_fp8(numerics: Numerics | None, device: torch.device) -> None:
    check_fp8_device(device)
    if numerics and not numerics.casts_weights:
        raise UsageError(
            f"trainer.precision fp8 needs numerics version 2 or later; this run was started with {numerics.version}.",
            remedy="Set trainer.precision to bf16, or start a new run.",
        )


def build_adapter(section: ModelSection, tokenizer_vocab: int, numerics: Numerics | None = None) -> ModelAdapter:
    adapter_class = registry.resolve("model.name", section.name, registry.MODELS)
    with plugin_errors(adapter_class, "__init__"):
        adapter: ModelAdapter = adapter_class(section, tokenizer_vocab)
    adapter.numerics = numerics or Numerics()
    return adapter


def build_objective(section: ObjectiveSection) -> Objective:
    objective_class = registry.resolve("trainer.objective", section.name, registry.OBJECTIVES)
    with plugin_errors(objective_class, "__init__"):
        objective: Objective = objective_class(section)
    return objective


def build_module(
    adapter: ModelAdapter, trainer: TrainerSection, distributed: DistributedSection, seed: int, world: World
) -> nn.Module:
    with seeded(derive_seed(seed, "init")):
        module = build_checked(adapter)
    if not trainable_count(module):
        what = "build returned a module without trainable parameters:"
        raise wrong_result(type(adapter), what, module, "at least one parameter with requires_grad")
    if compute_precision(trainer, world.device) == "fp8":
        use_fp8(adapter.blocks(module))
    if is_sharding(distributed, world):
        return module  # stays on the CPU: it moves to the GPU one block at a time, and FSDP casts its weights
    module = module.to(world.device)
    dtype = cast_dtype(trainer, adapter, world.device)
    if dtype:
        compute_in(module, dtype)
    return module


def _check_matrices(adapter: ModelAdapter, module: nn.Module) -> None:
    """Refuse a model without matrices that muon could train."""
    if block_matrices(adapter, module):
        return
    remedy = "Set trainer.optimizer to adamw"
    if is_plugin_class(type(adapter)):
        remedy += f", or return its blocks from {type(adapter).__name__}.blocks"
    raise UsageError(
        f"trainer.optimizer muon needs matrices in transformer blocks, and model.name {adapter.config.name} has none.",
        remedy=f"{remedy}.",
    )


def _check_packing(adapter: ModelAdapter, module: nn.Module, first: Batch, field: str) -> None:
    """Refuse a model that ignores where an example or a document of a sequence begins."""
    if first.positions is not None and not adapter.separates_packed_examples(module):
        parts = "examples" if field == "data.packing" else "documents"
        raise UsageError(
            f"{field} is true, but in this model's architecture the {parts} of a sequence attend to each other.",
            remedy=f"Set {field} to false.",
        )


def _check_plugin(adapter: ModelAdapter, module: nn.Module, batch: Batch) -> None:
    """Refuse a plugin whose output the loss cannot use, and methods that fail. Weights, modes and random state stay as
    they are."""
    kind = type(adapter)
    first = batch.first_sequence()
    with preserved(), torch.no_grad(), evaluating(module):  # batch norm must not count this sequence
        if kind.loss is ModelAdapter.loss:
            with plugin_errors(kind, "the module returned by build"):
                logits = module(first.inputs)
            _check_logits(adapter, logits, tuple(first.inputs.shape))
        else:
            with plugin_errors(kind, "loss"):
                loss: object = adapter.loss(module, first.inputs, first.targets, first.positions)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise wrong_result(kind, "loss returned", loss, "a tensor with one element")
    with plugin_errors(kind, "flops_per_token"):
        flops: object = adapter.flops_per_token(module)
    if not isinstance(flops, int | float):
        raise wrong_result(kind, "flops_per_token returned", flops, "a number")


def _check_logits(adapter: ModelAdapter, logits: Any, shape: tuple[int, ...]) -> None:
    is_right = (
        isinstance(logits, torch.Tensor)
        and logits.dim() == 3
        and logits.shape[:2] == shape
        and logits.shape[2] >= adapter.vocab_size
    )
    if not is_right:
        what = f"for token ids of shape {shape}, the module returned by build returned"
        expected = f"logits of shape (B, T, vocab_size), here {(*shape, adapter.vocab_size)}"
        raise wrong_result(type(adapter), what, logits, expected)


def base_sha256(adapter: ModelAdapter, cache_dir: str) -> str | None:
    """SHA-256 of the base model, which checkpoints do not contain; None without a base model."""
    files = adapter.base_files()
    return files_sha256(files, Path(cache_dir).expanduser()) if files else None


def resume_fingerprint(
    config: Config, prepared: PreparedData | PreparedMixture, adapter: ModelAdapter, world: World, micro_batches: int
) -> dict[str, Any]:
    """What a checkpoint records so that a resume can check whether config, data and code are unchanged."""
    base = adapter.base_model()
    recorded = {
        "config": redact_values(config.as_dict()),
        "data_fingerprint": prepared.fingerprint,
        "tokenizer_sha256": prepared.tokenizer.sha256(),
        "vocab_size": adapter.vocab_size,
        "micro_batches": micro_batches,
        "numerics": adapter.numerics.version,
        "world_size": world.world_size,
        "device": world.device.type,
        "precision": compute_precision(config.trainer, world.device),
        "architecture": cpu_architecture(),
        "versions": versions(),
        "base_model": str(base) if base else None,
    }
    plugins = {field: facts for field, facts in describe_plugins(config).items() if not field.startswith("tracking.")}
    if plugins:
        recorded["plugins"] = plugins
    return recorded


def _check_same_on_all_ranks(components: Components, world: World) -> None:
    """Refuse to train where the ranks have other data, other code or another base model."""
    plugins = components.recorded.get("plugins", {})
    base_files = components.adapter.base_files()
    values = {
        "data": f"{components.prepared.fingerprint} {components.recorded['tokenizer_sha256']}",
        "code": str({field: facts["sha256"] for field, facts in plugins.items()}),
        "base model": str([(path.name, path.stat().st_size) for path in base_files]),
    }
    remedies = {"data": "data files", "code": "version of your classes", "base model": "model directory"}
    for what, value in values.items():
        by_rank = world.control.gather(value)
        different = [str(rank) for rank, other in enumerate(by_rank) if other != by_rank[0]]
        if different:
            raise UsageError(
                f"The {what} of rank {', '.join(different[:10])} differs from that of rank 0.",
                remedy=f"Give every process the same {remedies[what]}.",
            )
