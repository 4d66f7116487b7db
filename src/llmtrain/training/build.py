"""The parts of a run, each made from the sections of the config it needs."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmtrain import registry
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
from llmtrain.distributed.parallel import ParallelModel, is_sharding, parallelize
from llmtrain.distributed.world import World
from llmtrain.env import SHARED_CORES
from llmtrain.errors import UsageError
from llmtrain.logs import warn
from llmtrain.models.base import LossFunction, ModelAdapter
from llmtrain.redact import redact_values
from llmtrain.runs.metadata import cpu_architecture, versions
from llmtrain.tracking.base import NullTracker, TrackedRun, Trackers
from llmtrain.training.resume import Resumption, recorded_threads
from llmtrain.training.step import Stepper

GPU_ATTENTION = ("flash_attention_2", "flex_attention")
"""Values of model.attention that have no form for a CPU."""


@dataclass(frozen=True)
class Components:
    """What a run is made of, ready before anything is written."""

    prepared: PreparedData
    adapter: ModelAdapter
    train_batches: TrainBatches
    eval_batches: EvalBatches
    module: nn.Module
    micro_batches: int
    """In a step, of all processes together."""
    recorded: dict[str, Any]
    """What a checkpoint keeps besides tensors and progress: config, data fingerprint, versions."""


def build_components(config: Config, world: World) -> Components:
    """Data and model. Anything that is wrong with them shows here, before there is a run directory."""
    micro_batches = micro_batches_in_step(config, world.world_size)
    check_trackers(config)
    check_combination(config, world)
    assert config.run.threads
    prepared = build_data(config).prepare(config.run.threads)
    for prompt in config.trainer.eval_prompts:
        prepared.tokenizer.encode(prompt)  # a character it does not know shows now
    adapter = build_adapter(as_computed(config, world.device), prepared.tokenizer.vocab_size)
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
    first = train_batches[0]  # a damaged token store shows now
    module = build_module(config, adapter, world)
    with autocast_for(config, world)():
        adapter.examine(module)
        keeps_apart = first.positions is None or adapter.keeps_rows_apart(module)
    if not keeps_apart:
        raise UsageError(
            "data.packing is true, but this model's architecture lets packed rows see each other.",
            remedy="Set data.packing to false.",
        )
    recorded = resume_fingerprint(config, prepared, adapter, world, micro_batches)
    return Components(prepared, adapter, train_batches, eval_batches, module, micro_batches, recorded)


def check_combination(config: Config, world: World) -> None:
    """Settings that are each right but do not work together here."""
    model = config.model if isinstance(config.model, HfCausalLmSection) else None
    lora, attention = (model.lora, model.attention) if model else (None, None)
    if lora and config.trainer.optimizer == "adafactor":
        raise UsageError(
            "trainer.optimizer adafactor makes steps in proportion to a weight, and half of LoRA's start at zero.",
            remedy="Use adamw: adapters are small, and so are its averages.",
        )
    if lora and lora.quantize and config.distributed.strategy == "fsdp":
        raise UsageError(
            "model.lora.quantize does not go with distributed.strategy fsdp: 4-bit weights cannot be sharded.",
            remedy="Use distributed.strategy ddp.",
        )
    if attention in GPU_ATTENTION and world.device.type == "cpu":
        raise UsageError(f"model.attention {attention} needs a GPU.", remedy="Set model.attention to sdpa or eager.")
    if as_computed(config, world.device) != config and world.is_first:
        warn("TRAIN", "this CPU has no bfloat16 instructions: computing in float32, which is faster here")


def base_sha256(config: Config, adapter: ModelAdapter) -> str | None:
    """Of the model that is built upon, which checkpoints do not hold; None where there is none."""
    files = adapter.base_files()
    return files_sha256(files, Path(config.data.cache_dir).expanduser()) if files else None


def build_data(config: Config) -> DataModule:
    """The dataset. Where no tokenizer is named it gets the model's own; the config that is recorded stays as it is."""
    kind = registry.resolve("model.name", config.model.name, registry.MODELS)
    tokenizer = config.data.tokenizer or kind.own_tokenizer(config.model)
    data: DataModule = registry.resolve("data.name", config.data.name, registry.DATA)(
        config.data.model_copy(update={"tokenizer": tokenizer}), config.run.seed
    )
    return data


def resolve_steps(config: Config, train_batches: TrainBatches) -> Config:
    """A number of steps, now that it is known how many an epoch takes."""
    trainer = config.trainer
    if trainer.max_epochs is None:
        return config
    in_epochs = train_batches.steps_in(trainer.max_epochs)
    settled = config.with_values("trainer", max_steps=min(trainer.max_steps or in_epochs, in_epochs))
    for _, problem in settled.trainer.problems():
        raise UsageError(problem)
    return settled


def resolve_threads(config: Config, resumption: Resumption | None, world: World) -> tuple[Config, str]:
    """The config with a number of threads, and where that came from: the config, else the first start of the run, else
    OMP_NUM_THREADS, else this process's share of the cores. A resumed run's own config has the recorded number."""
    recorded, from_environment = recorded_threads(resumption), omp_threads(os.environ)
    if from_environment is None and os.environ.get("OMP_NUM_THREADS") and SHARED_CORES not in os.environ:
        warn("TRAIN", f"OMP_NUM_THREADS is ignored: not a number from 1 to {MAX_THREADS}")
    if recorded and config.run.threads in (None, recorded):
        threads, source = recorded, "recorded at the first start"
    elif config.run.threads:
        threads, source = config.run.threads, "run.threads"
        if recorded:
            warn("TRAIN", f"run.threads was {recorded} and is {threads} now: sums may round differently")
    elif from_environment:
        threads, source = from_environment, "OMP_NUM_THREADS"
    else:
        cores, processes = usable_cores(), world.local_world_size
        threads, source = max(1, cores // processes), f"cores: {cores}, processes: {processes}"
    return config.with_values("run", threads=threads), source


def set_up_torch(config: Config) -> None:
    assert config.run.threads
    torch.set_num_threads(config.run.threads)
    if config.run.deterministic:
        # cuBLAS reads this when it starts; without it, deterministic mode refuses matrix products on a GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != config.run.deterministic:  # setting it costs a second
        torch.use_deterministic_algorithms(config.run.deterministic)
    torch.backends.cudnn.benchmark = not config.run.deterministic


def check_trackers(config: Config) -> None:
    """A tracker that is asked for but not installed is a mistake to report now, not to lose later."""
    if config.tracking.mlflow.enabled:
        from llmtrain.tracking.mlflow import check_installed

        check_installed()
    if config.tracking.tensorboard.enabled:
        from llmtrain.tracking.tensorboard import check_installed

        check_installed()


def open_trackers(run: TrackedRun) -> NullTracker:
    names = ["jsonl", "console"]
    names += ["mlflow"] if run.config.tracking.mlflow.enabled else []
    names += ["tensorboard"] if run.config.tracking.tensorboard.enabled else []
    opened: list[NullTracker] = []
    for name in names:
        try:
            opened.append(registry.resolve("tracker", name, registry.TRACKERS)(run))
        except Exception as problem:
            if name == "jsonl":
                raise  # a run without its own metrics is no run
            warn("TRAIN", f"{name} could not be opened and is left out; training goes on: {problem}")
    return Trackers(opened)


def build_adapter(config: Config, tokenizer_vocab: int) -> ModelAdapter:
    adapter: ModelAdapter = registry.resolve("model.name", config.model.name, registry.MODELS)(
        config.model, tokenizer_vocab
    )
    return adapter


def build_module(config: Config, adapter: ModelAdapter, world: World) -> nn.Module:
    torch.manual_seed(derive_seed(config.run.seed, "init"))
    module = adapter.build()
    # A model to be sharded stays on the CPU: it goes to the GPU a block at a time.
    return module if is_sharding(config.distributed, world) else module.to(world.device)


def wrap(config: Config, world: World, parts: Components) -> tuple[ParallelModel, LossFunction]:
    """The model as the step calls it, and the loss over it; compiled where that is asked for."""
    loss: LossFunction = parts.adapter.loss
    is_sharded = is_sharding(config.distributed, world)
    if is_sharded and config.trainer.optimizer == "adafactor":  # in a world of one process, too
        raise adafactor_with_fsdp()
    if config.trainer.compile:
        loss = parts.adapter.compiled(parts.module, by_block=is_sharded)
    wrapped = parallelize(
        parts.module,
        parts.adapter.blocks,
        config.distributed,
        world,
        as_computed(config, world.device).trainer.precision,
        parts.micro_batches,
    )
    return wrapped, loss


def build_stepper(
    config: Config,
    world: World,
    parts: Components,
    wrapped: ParallelModel,
    loss: LossFunction,
    optimizer: torch.optim.Optimizer,
    tick: Callable[[], None],
) -> Stepper:
    return Stepper(
        wrapped=wrapped,
        module=parts.module,
        loss=loss,
        optimizer=optimizer,
        world=world,
        seed=config.run.seed,
        dropout=parts.adapter.uses_dropout,
        max_grad_norm=config.trainer.max_grad_norm,
        autocast=autocast_for(config, world),
        tick=tick,
    )


def as_computed(config: Config, device: torch.device) -> Config:
    """The config with the precision that this device computes in. A CPU without bfloat16 instructions would emulate
    them, an order of magnitude slower than float32; what is recorded stays as it was given."""
    if has_bf16(device):
        return config
    return config.with_values("trainer", precision="fp32").with_values("model", dtype="float32")


def has_bf16(device: torch.device) -> bool:
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def autocast_for(config: Config, world: World) -> Callable[[], AbstractContextManager[None]]:
    if as_computed(config, world.device).trainer.precision == "fp32":
        return nullcontext
    return lambda: torch.autocast(world.device.type, dtype=torch.bfloat16)


def resume_fingerprint(
    config: Config, prepared: PreparedData, adapter: ModelAdapter, world: World, micro_batches: int
) -> dict[str, Any]:
    """What a checkpoint records so that a later run can tell whether it is the same one."""
    return {
        "config": redact_values(config.as_dict()),
        "data_fingerprint": prepared.fingerprint,
        "tokenizer_sha256": prepared.tokenizer.sha256(),
        "vocab_size": adapter.vocab_size,
        "micro_batches": micro_batches,
        "world_size": world.world_size,
        "device": world.device.type,
        "architecture": cpu_architecture(),
        "versions": versions(),
    }
