"""Assembles a training run, in order, from a config; and the two ways in: run_training and dry_run."""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn

from llmtrain import registry
from llmtrain.config.document import dump_document
from llmtrain.config.schema import Config
from llmtrain.data.base import PreparedData
from llmtrain.data.batches import EvalBatches, TrainBatches
from llmtrain.data.sampler import derive_seed
from llmtrain.data.tokenizer import is_saved_tokenizer
from llmtrain.distributed.world import World, find_world, usable_cores
from llmtrain.errors import DataError, ResumeMe, Superseded
from llmtrain.logs import log, setup_logging, warn
from llmtrain.models.base import ModelAdapter, parameter_count
from llmtrain.runs.atomic import write_atomic, write_json
from llmtrain.runs.directory import RunDirectory, new_run
from llmtrain.runs.lock import RunLock
from llmtrain.runs.metadata import collect_metadata, versions
from llmtrain.runs.redact import redact_values
from llmtrain.tracking.base import NullTracker, Status, TrackedRun, Trackers
from llmtrain.training.checkpoint import CheckpointStore
from llmtrain.training.faults import fault
from llmtrain.training.optim import build_optimizer
from llmtrain.training.resume import (
    Resumption,
    TrainResult,
    already_finished,
    check_config,
    check_recorded,
    find_resumed_run,
    find_resumption,
    restore,
)
from llmtrain.training.sample import sample_text
from llmtrain.training.shutdown import StopFlag
from llmtrain.training.state import model_tensors, optimizer_tensors, state_sha256
from llmtrain.training.step import LossFunction, Stepper
from llmtrain.training.throughput import Throughput, peak_memory_bytes
from llmtrain.training.trainer import Trainer

SAMPLE_TOKENS = 300
SAMPLE_SEC = 10.0


def run_training(
    config: Config, resume: str | None = None, allow_config_change: bool = False, stop: StopFlag | None = None
) -> TrainResult:
    """Train, or go on training, to trainer.max_steps; the result is what `train --json` prints."""
    setup_logging(config.logging)
    with ExitStack() as stack:
        stop = stop or stack.enter_context(StopFlag())
        world = find_world(config.distributed, config.run)
        existing = find_resumed_run(config, resume) if resume else None
        run = existing or new_run(config.output.root_dir, config.output.run_id, config.run.name)
        lock = RunLock(run.lock)
        resumption = None
        if existing:
            stack.enter_context(lock)  # first: the checkpoint chosen next must not be pruned by a living owner
            resumption = find_resumption(existing, resume or "auto")
        config = settle_threads(config, resumption)
        if resumption:
            if resumption.checkpoint:
                check_config(resumption.checkpoint, config, allow_config_change)
            done = already_finished(config, resumption)
            if done:
                return done
        set_up_torch(config)
        check_trackers(config)
        data = registry.resolve("data.name", config.data.name, registry.DATA)(config.data, config.run.seed)
        prepared: PreparedData = data.prepare(config.run.threads)
        adapter = build_adapter(config, prepared.tokenizer.vocab_size)
        recorded = what_decides(config, prepared, adapter, world)
        if resumption and resumption.checkpoint:
            check_recorded(resumption.checkpoint, recorded, allow_config_change)
        batches = make_batches(config, prepared, adapter)
        batches[0][0]  # a damaged token store shows now, before there is a run directory
        module = build_module(config, adapter, world)
        stop.enter_loop()  # from here on there is something on disk: a signal waits for the loop
        if not existing:
            run.create()
            stack.enter_context(lock)
        return _train(config, world, run, resumption, prepared, adapter, module, batches, recorded, lock, stop)


def _train(
    config: Config,
    world: World,
    run: RunDirectory,
    resumption: Resumption | None,
    prepared: PreparedData,
    adapter: ModelAdapter,
    module: nn.Module,
    batches: tuple[TrainBatches, EvalBatches],
    recorded: dict[str, Any],
    lock: RunLock,
    stop: StopFlag,
) -> TrainResult:
    setup_logging(config.logging, run.logs / config.logging.file_name if config.logging.log_to_file else None)
    optimizer = build_optimizer(module, config.trainer)
    store = CheckpointStore(run.checkpoints)
    progress = restore(resumption, store, module, optimizer)
    describe_run(config, run, prepared, world)
    parameters = parameter_count(module)
    tokens_per_step = config.trainer.micro_batch_size * config.trainer.grad_accum_steps * config.model.block_size
    log("DDP", f"rank {world.rank} of {world.world_size} on {world.device}, {config.run.threads} threads")
    log(
        "TRAIN",
        f"run {run.run_id}: {parameters:,} parameters, {len(prepared.train):,} training tokens, "
        f"{tokens_per_step:,} tokens a step, from step {progress.step} to {config.trainer.max_steps}",
    )
    facts = {"parameters": parameters, "tokens_per_step": tokens_per_step, "device": str(world.device)}
    tracker = open_trackers(TrackedRun(run, config, progress.step, progress.evaluated_step, facts))
    throughput = Throughput(world.device, tokens_per_step, adapter.flops_per_token(module))
    micro_steps = range(
        progress.step * config.trainer.grad_accum_steps,
        config.trainer.max_steps * config.trainer.grad_accum_steps,
    )
    trainer = Trainer(
        config=config.trainer,
        stepper=build_stepper(config, adapter, module, optimizer, world),
        train_batches=batches[0].stream(micro_steps, config.data.num_workers, world.device.type == "cuda"),
        eval_batches=batches[1],
        store=store,
        tracker=tracker,
        progress=progress,
        throughput=throughput,
        lock=lock,
        stop=stop,
        recorded=recorded,
        saved=(progress.step, progress.evaluated_step),
    )
    started = time.perf_counter()
    status: Status = "failed"
    result: TrainResult | None = None
    try:
        trainer.fit()
        fault("after_final_save", progress.step)
        result = {
            "run_id": run.run_id,
            "run_dir": str(run.path),
            "status": "finished",
            "steps": progress.step,
            "resumed_from": resumption.checkpoint.step if resumption and resumption.checkpoint else None,
            "first_train_loss": progress.first_train_loss,
            "final_train_loss": progress.last_train_loss,
            "final_val_loss": progress.last_val_loss,
            "best_val_loss": progress.best_val_loss,
            "best_step": progress.best_step,
            "best_checkpoint": str(best.path) if (best := store.pointed("best")) else None,
            "tokens": progress.tokens,
            "tokens_per_second": round(throughput.overall, 1),
            "mfu": throughput.mfu(throughput.overall),
            "seconds": round(time.perf_counter() - started, 2),
            "parameters": parameters,
            "device": str(world.device),
            "threads": config.run.threads,
            "peak_memory_bytes": peak_memory_bytes(world.device),
            "state_sha256": state_sha256(model_tensors(module), optimizer_tensors(module, optimizer)),
            "sample": write_sample(module, prepared, config, stop),
        }
        lock.check()
        write_json(run.finished, result)
        status = "finished"
        return result
    except Superseded:
        status = "superseded"
        raise
    except ResumeMe as told:
        status = "stopped"
        told.remedy = f"Go on with: llmtrain train --resume {run.path}"
        told.details = {"run_id": run.run_id, "run_dir": str(run.path), "steps": progress.step}
        raise
    finally:
        tracker.finish(status, result)
        if status == "finished":
            log(
                "DONE",
                f"{progress.step} steps, train loss {progress.last_train_loss:.4f}, "
                f"val loss {progress.last_val_loss:.4f}, best {progress.best_val_loss:.4f}",
            )
        setup_logging(config.logging)  # lets go of the run's log file


def dry_run(config: Config) -> dict[str, Any]:
    """One forward pass, nothing written but the token cache: does it fit, and how large is it?"""
    setup_logging(config.logging)
    world = find_world(config.distributed, config.run)
    config = settle_threads(config, None)
    set_up_torch(config)
    data = registry.resolve("data.name", config.data.name, registry.DATA)(config.data, config.run.seed)
    prepared: PreparedData = data.prepare(config.run.threads)
    adapter = build_adapter(config, prepared.tokenizer.vocab_size)
    train_batches, eval_batches = make_batches(config, prepared, adapter)
    module = build_module(config, adapter, world)
    batch = train_batches[0].to(world.device)
    with autocast_for(config, world)():  # with gradients on: the activations a real step keeps count too
        loss = adapter.loss(module, batch.inputs, batch.targets).item() / batch.target_count
    parameters = parameter_count(module)
    tokens_per_step = batch.target_count * config.trainer.grad_accum_steps
    return {
        "dry_run": True,
        "model": config.model.name,
        "device": str(world.device),
        "parameters": parameters,
        "vocab_size": adapter.vocab_size,
        "train_tokens": len(prepared.train),
        "val_tokens": len(prepared.val),
        "eval_batches": len(eval_batches),
        "tokens_per_step": tokens_per_step,
        "epochs": round(tokens_per_step * config.trainer.max_steps / len(prepared.train), 3),
        "loss": loss,
        # float32 weights and gradients, and AdamW's two averages (Adafactor keeps next to nothing)
        "state_bytes": (16 if config.trainer.optimizer == "adamw" else 8) * parameters,
        "peak_memory_bytes": peak_memory_bytes(world.device),
    }


def settle_threads(config: Config, resumption: Resumption | None) -> Config:
    """A number of threads: the config's, else the one the run began with, else the cores there are."""
    recorded = None
    if resumption and resumption.checkpoint:
        recorded = resumption.checkpoint.state().get("config", {}).get("run", {}).get("threads")
        if config.run.threads and recorded and config.run.threads != recorded:
            warn(
                "TRAIN",
                f"run.threads was {recorded} and is {config.run.threads} now: sums may round differently",
            )
    return config.with_values("run", threads=config.run.threads or recorded or usable_cores())


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
    if config.mlflow.enabled:
        from llmtrain.tracking.mlflow import check_installed

        check_installed()
    if config.logging.tensorboard:
        from llmtrain.tracking.tensorboard import check_installed

        check_installed()


def open_trackers(run: TrackedRun) -> NullTracker:
    names = ["jsonl", "console"]
    names += ["mlflow"] if run.config.mlflow.enabled else []
    names += ["tensorboard"] if run.config.logging.tensorboard else []
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
    return adapter.build().to(world.device)


def make_batches(config: Config, prepared: PreparedData, adapter: ModelAdapter) -> tuple[TrainBatches, EvalBatches]:
    size, block = config.trainer.micro_batch_size, config.model.block_size
    return (
        TrainBatches(prepared.train, block, size, config.run.seed, adapter.vocab_size),
        EvalBatches(prepared.val, block, size, adapter.vocab_size, config.trainer.eval_batches),
    )


def build_stepper(
    config: Config, adapter: ModelAdapter, module: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> Stepper:
    loss: LossFunction = adapter.loss
    if config.trainer.compile:
        loss = torch.compile(adapter.loss)
    return Stepper(
        module=module,
        loss=loss,
        optimizer=optimizer,
        device=world.device,
        seed=config.run.seed,
        dropout=config.model.dropout > 0,
        max_grad_norm=config.trainer.max_grad_norm,
        autocast=autocast_for(config, world),
    )


def autocast_for(config: Config, world: World) -> Callable[[], AbstractContextManager[None]]:
    if config.trainer.precision == "fp32":
        return nullcontext
    return lambda: torch.autocast(world.device.type, dtype=torch.bfloat16)


def what_decides(config: Config, prepared: PreparedData, adapter: ModelAdapter, world: World) -> dict[str, Any]:
    """What a checkpoint records so that a later run can tell whether it is the same one."""
    return {
        "config": redact_values(config.as_dict()),
        "data_fingerprint": prepared.fingerprint,
        "vocab_size": adapter.vocab_size,
        "world_size": world.world_size,
        "device": world.device.type,
        "versions": versions(),
    }


def describe_run(config: Config, run: RunDirectory, prepared: PreparedData, world: World) -> None:
    """Write down what the run is; a resumed run keeps the metadata of its first start."""
    if config.output.save_config_copy:
        settled = config.with_values("output", run_id=run.run_id)
        write_atomic(run.config, dump_document(redact_values(settled.as_dict())))
    if config.output.save_meta_json and not run.meta.exists():
        write_json(run.meta, collect_metadata(run.run_id, config.run.name, str(world.device)))
    if not is_saved_tokenizer(run.tokenizer):
        prepared.tokenizer.save(run.tokenizer)


def write_sample(module: nn.Module, prepared: PreparedData, config: Config, stop: StopFlag) -> str:
    """A look at what the model learned, within a few seconds."""
    deadline = time.monotonic() + SAMPLE_SEC
    try:
        return sample_text(
            module,
            prepared.tokenizer,
            "",
            SAMPLE_TOKENS,
            config.model.block_size,
            temperature=0.8,
            top_k=50,
            seed=config.run.seed,
            stop=lambda: stop.requested or time.monotonic() > deadline,
        )
    except DataError:  # a char tokenizer of a text without line breaks
        return ""
