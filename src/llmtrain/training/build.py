"""Builds the components of a run, each from the config sections it needs."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from llmtrain import registry
from llmtrain.config.check_plugins import describe_plugins
from llmtrain.config.model import HfCausalLmSection
from llmtrain.config.run import MAX_THREADS
from llmtrain.config.schema import Config
from llmtrain.content_hash import files_sha256
from llmtrain.data.base import DataModule, PreparedData
from llmtrain.data.batches import EvalBatches, TrainBatches
from llmtrain.data.make_batches import make_batches
from llmtrain.data.sampler import derive_seed
from llmtrain.distributed.batch_split import adafactor_with_fsdp, micro_batches_in_step
from llmtrain.distributed.env import omp_threads, usable_cores
from llmtrain.distributed.parallel import is_sharding, parallelize
from llmtrain.distributed.world import World
from llmtrain.env import SHARED_CORES, restored_environment
from llmtrain.errors import DataError, UsageError
from llmtrain.logs import warn
from llmtrain.models import losses
from llmtrain.models.activation_checkpointing import checkpoint_blocks
from llmtrain.models.base import LossFunction, ModelAdapter, block_matrices, build_checked, trainable_count
from llmtrain.models.compute_dtype import compute_in
from llmtrain.models.device_precision import with_device_precision
from llmtrain.models.numerics import Numerics
from llmtrain.plugins import is_own, parse_options, user_code, wrong_result
from llmtrain.progress import is_notebook, phase
from llmtrain.redact import redact_values
from llmtrain.runs.metadata import cpu_architecture, versions
from llmtrain.text import plural
from llmtrain.tracking import mlflow, train_job, wandb
from llmtrain.tracking.base import TrackedRun, Tracker, Trackers
from llmtrain.training import optim
from llmtrain.training.memory_errors import check_memory, explained
from llmtrain.training.model import ModelHandle
from llmtrain.training.muon import build_muon
from llmtrain.training.own_model import check_own_model
from llmtrain.training.precision import autocast_for, cast_dtype
from llmtrain.training.random_state import seeded
from llmtrain.training.resume import Resumption, recorded_threads

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
GPU_ATTENTION = ("flash_attention_2", "flex_attention")
"""Values of model.attention that require a GPU."""


@dataclass(frozen=True)
class Components:
    """Data and model of a run, built before anything is written."""

    prepared: PreparedData
    adapter: ModelAdapter
    train_batches: TrainBatches
    eval_batches: EvalBatches
    module: nn.Module
    """Not yet parallelized: the steps of a run use a ModelHandle."""
    micro_batches: int
    """Per step, over all processes."""
    recorded: dict[str, Any]
    """What a checkpoint records besides tensors and progress: config, data fingerprint, versions."""


def build_components(
    config: Config, world: World, numerics: Numerics | None = None, is_dry_run: bool = False
) -> Components:
    """Data and model. Problems with either are raised here, before the run directory exists. `numerics`: those of the
    run that is resumed; a new run has the latest."""
    micro_batches = micro_batches_in_step(config, world.world_size)
    check_trackers(config)
    check_combination(config, world)
    assert config.run.threads
    prepared = build_data(config).prepare(config.run.threads)
    for prompt in config.trainer.eval_prompts:
        prepared.tokenizer.encode(prompt)  # raises for characters that are not in the vocabulary
    phase("building the model")
    vocab_size = prepared.tokenizer.vocab_size
    adapter = build_adapter(with_device_precision(config, world.device), vocab_size, numerics)
    train_batches, eval_batches = make_batches(
        prepared,
        config.data,
        block_size=config.model.block_size,
        micro_batch_size=config.trainer.micro_batch_size,
        micro_batches=micro_batches,
        seed=config.run.seed,
        vocab_size=adapter.vocab_size,
        eval_limit=config.trainer.eval_batches,
        can_pack=adapter.can_pack,
    )
    first = train_batches[0]  # raises if the token store is damaged
    adapter.prepare_for(world.device, is_packed=first.positions is not None)
    check_memory(config, adapter, world, is_dry_run)
    with explained(world.device):
        module = build_module(config, adapter, world)
    check_matrices(config, adapter, module)
    with explained(world.device), autocast_for(config, adapter, world.device)():
        if is_own(type(adapter)) and not is_sharding(config.distributed, world):  # else it is on the CPU still
            check_own_model(adapter, module, first.to(world.device))
        adapter.probe(module)
        isolates_examples = first.positions is None or adapter.separates_packed_examples(module)
    if not isolates_examples:
        raise UsageError(
            "data.packing is true, but in this model's architecture packed examples attend to each other.",
            remedy="Set data.packing to false.",
        )
    recorded = resume_fingerprint(config, prepared, adapter, world, micro_batches)
    return Components(prepared, adapter, train_batches, eval_batches, module, micro_batches, recorded)


def check_combination(config: Config, world: World) -> None:
    """Refuse settings that are valid alone but not together or on this device."""
    model = config.model if isinstance(config.model, HfCausalLmSection) else None
    lora, attention = (model.lora, model.attention) if model else (None, None)
    if lora and config.trainer.optimizer == "adafactor":
        raise UsageError(
            "trainer.optimizer adafactor does not work with LoRA: its steps are proportional to the weights, and half "
            "of LoRA's weights start at zero.",
            remedy="Use adamw: adapters are small, and so is its state.",
        )
    if lora and lora.quantize and config.distributed.strategy == "fsdp":
        raise UsageError(
            "model.lora.quantize does not work with distributed.strategy fsdp: 4-bit weights cannot be sharded.",
            remedy="Use distributed.strategy ddp.",
        )
    if attention in GPU_ATTENTION and world.device.type == "cpu":
        raise UsageError(f"model.attention {attention} needs a GPU.", remedy="Set model.attention to sdpa or eager.")
    if with_device_precision(config, world.device) != config and world.is_first:
        warn("TRAIN", "this CPU has no bfloat16 instructions: computing in float32, which is faster here")


def base_sha256(config: Config, adapter: ModelAdapter) -> str | None:
    """SHA-256 of the base model, which checkpoints do not contain; None without a base model."""
    files = adapter.base_files()
    return files_sha256(files, Path(config.data.cache_dir).expanduser()) if files else None


def build_data(config: Config) -> DataModule:
    """The dataset. Without data.tokenizer it uses the model's own tokenizer; the recorded config is not changed."""
    model = registry.resolve("model.name", config.model.name, registry.MODELS)
    with user_code(model, "default_tokenizer"):
        tokenizer = config.data.tokenizer or model.default_tokenizer(config.model)
    kind = registry.resolve("data.name", config.data.name, registry.DATA)
    with user_code(kind, "__init__", DataError):
        data: DataModule = kind(config.data.model_copy(update={"tokenizer": tokenizer}), config.run.seed)
    return data


def resolve_steps(config: Config, train_batches: TrainBatches) -> Config:
    """The config with trainer.max_steps set, now that the number of steps per epoch is known."""
    trainer = config.trainer
    if trainer.max_epochs is None:
        return config
    in_epochs = train_batches.steps_in(trainer.max_epochs)
    resolved = config.with_values("trainer", max_steps=min(trainer.max_steps or in_epochs, in_epochs))
    for _, problem in resolved.trainer.problems():
        raise UsageError(problem)
    return resolved


def resolve_threads(config: Config, resumption: Resumption | None, world: World) -> tuple[Config, str]:
    """The config with run.threads set, and a text with the number and its source: the config, else the first start of
    the run, else OMP_NUM_THREADS, else this process's share of the cores."""
    recorded, from_environment = recorded_threads(resumption), omp_threads(os.environ)
    if from_environment is None and os.environ.get("OMP_NUM_THREADS") and SHARED_CORES not in os.environ:
        warn("TRAIN", f"ignoring OMP_NUM_THREADS: it must be an integer from 1 to {MAX_THREADS}")
    if recorded and config.run.threads in (None, recorded):
        threads, source = recorded, "recorded at the first start"
    elif config.run.threads:
        threads, source = config.run.threads, "run.threads"
        if recorded:
            warn("TRAIN", f"run.threads changed from {recorded} to {threads}: results are no longer bit-exact")
    elif from_environment:
        threads, source = from_environment, "OMP_NUM_THREADS"
    else:
        cores, processes = usable_cores(), world.local_world_size
        threads, source = max(1, cores // processes), f"cores: {cores}, processes: {processes}"
    return config.with_values("run", threads=threads), f"CPU threads: {threads} ({source})"


_first_threads: int | None = None
"""Thread count of the first training in this process."""


def set_up_torch(config: Config) -> None:
    global _first_threads
    assert config.run.threads
    _first_threads = _first_threads or config.run.threads
    if config.run.threads != _first_threads:
        warn(
            "TRAIN",
            f"this process trained with {plural(_first_threads, 'thread')} before, and some libraries keep that "
            f"number: with {config.run.threads} now, results may differ in the last bits from those of a new process",
        )
    torch.set_num_threads(config.run.threads)
    if config.run.deterministic:
        # Read by cuBLAS when it is initialized; without it deterministic mode refuses matrix products on a GPU.
        os.environ.setdefault(CUBLAS, ":4096:8")
    is_set = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if is_set != (config.run.deterministic, False):  # setting it costs a second
        torch.use_deterministic_algorithms(config.run.deterministic)
    torch.backends.cudnn.benchmark = not config.run.deterministic


@contextmanager
def restored_settings() -> Iterator[None]:
    """Restore what a training changes for the whole process: what set_up_torch and trainer.compile set, the random
    state of the CPU, and the variables of MLflow and W&B."""
    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    is_deterministic, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    bans_recompute = torch._functorch.config.ban_recompute_materialized_backward
    with restored_environment([CUBLAS, *mlflow.SETTINGS, *wandb.SETTINGS]):
        try:
            yield
        finally:
            losses.undo_compile()
            torch._functorch.config.ban_recompute_materialized_backward = bans_recompute
            torch.set_num_threads(threads)
            torch.set_rng_state(random_state)
            torch.backends.cudnn.benchmark = benchmark
            is_set = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
            if is_set != (is_deterministic, warns_only):
                torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)


def check_trackers(config: Config) -> None:
    """Raise if a tracker is enabled whose package is not installed."""
    for name in enabled_trackers(config):
        importlib.import_module(f"llmtrain.tracking.{name}").check_installed()


def enabled_trackers(config: Config) -> list[str]:
    """The trackers that need a package of their own."""
    tracking = config.tracking
    names = [name for name in ("mlflow", "tensorboard", "wandb") if getattr(tracking, name).enabled]
    return [*names, "prometheus"] if tracking.prometheus.port else names


def open_trackers(run: TrackedRun) -> Tracker:
    names = ["jsonl", "console", *enabled_trackers(run.config)]
    names += ["notebook"] if is_notebook() else []
    names += ["train_job"] if train_job.URL in os.environ else []
    opened: list[Tracker] = []
    for name in names:
        try:
            opened.append(registry.resolve("tracker", name, registry.TRACKERS)(run))
        except Exception as problem:
            if name == "jsonl":
                raise  # other commands need the run's own metrics
            _warn_disabled(name, problem)
    for custom in run.config.tracking.custom:
        try:
            kind = registry.resolve("tracking.custom", custom.name, {})
            opened.append(kind(run, parse_options(kind, custom.options)))
        except KeyboardInterrupt:
            raise
        except BaseException as problem:
            _warn_disabled(custom.name, problem)
    return Trackers(opened)


def _warn_disabled(name: str, problem: BaseException) -> None:
    warn("TRAIN", f"{name} could not be opened and is disabled; training continues: {problem}")


def build_adapter(config: Config, tokenizer_vocab: int, numerics: Numerics | None = None) -> ModelAdapter:
    kind = registry.resolve("model.name", config.model.name, registry.MODELS)
    with user_code(kind, "__init__"):
        adapter: ModelAdapter = kind(config.model, tokenizer_vocab)
    adapter.numerics = numerics or Numerics()
    return adapter


def build_module(config: Config, adapter: ModelAdapter, world: World) -> nn.Module:
    with seeded(derive_seed(config.run.seed, "init")):
        module = build_checked(adapter)
    if not trainable_count(module):
        what = "build returned a module without trainable parameters:"
        raise wrong_result(type(adapter), what, module, "at least one parameter with requires_grad")
    if is_sharding(config.distributed, world):
        return module  # stays on the CPU: it moves to the GPU one block at a time, and FSDP casts its weights
    module = module.to(world.device)
    dtype = cast_dtype(config, adapter, world.device)
    if dtype:
        compute_in(module, dtype)
    return module


def check_matrices(config: Config, adapter: ModelAdapter, module: nn.Module) -> None:
    if config.trainer.optimizer != "muon" or block_matrices(adapter, module):
        return
    own = f", or return its blocks from {type(adapter).__name__}.blocks" if is_own(type(adapter)) else ""
    raise UsageError(
        f"trainer.optimizer muon needs matrices in transformer blocks, and model.name {config.model.name} has none.",
        remedy=f"Set trainer.optimizer to adamw{own}.",
    )


def build_model(config: Config, world: World, components: Components) -> ModelHandle:
    """Parallelize the model and, if trainer.compile is set, compile its loss."""
    adapter, module = components.adapter, components.module
    loss_function: LossFunction = adapter.loss
    is_sharded = is_sharding(config.distributed, world)
    if is_sharded and config.trainer.optimizer == "adafactor":  # also in a world of one process
        raise adafactor_with_fsdp()
    checkpoint_activations(config, adapter, module)
    if config.trainer.compile:
        loss_function = adapter.compiled_loss(module, by_block=is_sharded)
    precision = with_device_precision(config, world.device).trainer.precision
    parallel = parallelize(module, adapter.blocks, config.distributed, world, precision, components.micro_batches)
    return ModelHandle(adapter, module, parallel, loss_function, autocast_for(config, adapter, world.device))


def build_optimizer(config: Config, world: World, model: ModelHandle) -> torch.optim.Optimizer:
    if config.trainer.optimizer != "muon":
        return optim.build_optimizer(model.module, config.trainer)
    # Bits that do not depend on the number of processes must not depend on how matrices are batched either.
    is_batched = world.device.type != "cpu" and not config.distributed.reproducible_reduce
    return build_muon(model.adapter, model.module, config.trainer, world, is_batched)


def checkpoint_activations(config: Config, adapter: ModelAdapter, module: nn.Module) -> None:
    kind = config.trainer.activation_checkpointing
    if kind == "none":
        return
    blocks = adapter.blocks(module)
    if not blocks:
        raise UsageError(
            f"trainer.activation_checkpointing is {kind}, but model {config.model.name} has no transformer blocks.",
            remedy="Set trainer.activation_checkpointing to none.",
        )
    checkpoint_blocks(blocks, is_selective=kind == "selective", has_dropout=adapter.uses_dropout)


def resume_fingerprint(
    config: Config, prepared: PreparedData, adapter: ModelAdapter, world: World, micro_batches: int
) -> dict[str, Any]:
    """What a checkpoint records so that a resume can tell whether config, data and code are unchanged."""
    plugins = {field: facts for field, facts in describe_plugins(config).items() if not field.startswith("tracking.")}
    return {
        "config": redact_values(config.as_dict()),
        "data_fingerprint": prepared.fingerprint,
        "tokenizer_sha256": prepared.tokenizer.sha256(),
        "vocab_size": adapter.vocab_size,
        "micro_batches": micro_batches,
        "numerics": adapter.numerics.version,
        "world_size": world.world_size,
        "device": world.device.type,
        "architecture": cpu_architecture(),
        "versions": versions(),
        **({"plugins": plugins} if plugins else {}),
    }
