"""Trains a config to its end: run_training assembles the run from top to bottom, in the order in which it happens."""

import os
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import torch

from llmtrain import fault_injection
from llmtrain.checkpoint.artifacts import Artifacts
from llmtrain.checkpoint.saver import Saver
from llmtrain.checkpoint.state import TrainState
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.output import OutputSection
from llmtrain.config.schema import Config
from llmtrain.data.batches import MicroBatchNumbers
from llmtrain.distributed.batch_split import MicroBatchRange, micro_batches_in_step
from llmtrain.distributed.control_group import peer_errors
from llmtrain.distributed.process_info import ProcessInfo
from llmtrain.distributed.world import World, current_process_info, join_world
from llmtrain.env import LAUNCH, START
from llmtrain.errors import Interrupted, PeerLost, Superseded
from llmtrain.fault_injection import inject_fault
from llmtrain.logs import log, log_on_every_rank, setup_logging
from llmtrain.models.base import parameter_count, trainable_count
from llmtrain.models.numerics import Numerics
from llmtrain.progress import ProgressMode, is_live, phase, progress_mode
from llmtrain.runs.directory import RunDirectory, new_run
from llmtrain.runs.generations import end_generation, has_restored, note_generation
from llmtrain.runs.heartbeats import clear_heartbeats
from llmtrain.runs.recorded_config import split_reference
from llmtrain.runs.sync import check_installed as check_sync_installed
from llmtrain.runs.sync import sync_finished
from llmtrain.tracking.base import CallbackTracker, OnLog, Status, TrackedRun, Tracker
from llmtrain.tracking.console import ConsoleTracker
from llmtrain.training.build import (
    Components,
    base_sha256,
    build_components,
    build_model,
    build_optimizer,
    open_trackers,
    resolve_steps,
    resolve_threads,
    set_up_torch,
)
from llmtrain.training.context import RunContext
from llmtrain.training.eval_prompts import EvalPrompts
from llmtrain.training.loop import Trainer
from llmtrain.training.model import ModelHandle
from llmtrain.training.origin import Origin, check_architecture, load_weights, resolve_origin
from llmtrain.training.ownership import RunOwnership, is_restart, may_be_restarted, owns_run
from llmtrain.training.rank_checks import check_same_data_and_model, check_shared_directory
from llmtrain.training.result import (
    TrainResult,
    build_result,
    complete_finished,
    find_finished_run,
    finished_result,
    publish_result,
    write_report,
)
from llmtrain.training.resume import (
    Resumption,
    check_config,
    check_not_past,
    check_recorded,
    find_resumed_run,
    find_resumption,
    recorded_numerics,
    restore,
    with_recorded_attention,
)
from llmtrain.training.run_files import write_run_files
from llmtrain.training.shutdown import StopFlag
from llmtrain.training.step import Stepper
from llmtrain.training.storage_errors import explain_storage_errors
from llmtrain.training.throughput import Throughput
from llmtrain.training.watchdog import Watchdog


def run_training(
    config: Config,
    resume: str | None = None,
    allow_config_change: bool = False,
    stop: StopFlag | None = None,
    progress: ProgressMode = "auto",
    start_from: str | None = None,
    on_log: OnLog | None = None,
) -> TrainResult:
    """Start or resume a run, or start one from the weights of RUN[@STEP], and train it to its end. Returns the result
    on every rank. `on_log` is called with the metrics of a step, on rank 0."""
    setup_logging(config.logging)
    with ExitStack() as stack:
        stack.enter_context(progress_mode(progress))
        stack.enter_context(explain_storage_errors(config))
        stop = stop or stack.enter_context(StopFlag())

        process = _check_before_joining(config)
        if finished := find_finished_run(config, resume, process):
            return complete_finished(config, *finished) if process.rank == 0 else finished[1]

        # The world; what has to be decided is decided by rank 0 for all
        world = stack.enter_context(join_world(config.distributed, config.run))
        stop.joined()
        stack.enter_context(peer_errors())
        fault_injection.set_rank(world.rank)
        rank0 = world.control.on_rank0

        # The run directory, and the checkpoint to resume from
        run, ownership, resumption = _open_run(config, resume, world, stack, start_from)
        config, threads = rank0(lambda: resolve_threads(with_recorded_attention(config, resumption), resumption, world))
        if resumption:
            rank0(lambda: check_config(resumption, config, allow_config_change))
            if result := rank0(lambda: finished_result(config, resumption, allow_config_change)):
                return complete_finished(config, run, result) if world.is_first else result
        if may_be_restarted():
            ownership.begin_generation(config, resumption)  # already now, to count crashes while data is prepared

        components = _build_components(config, world, rank0(lambda: recorded_numerics(resumption)))
        resolved = resolve_steps(config, components.train_batches)
        rank0(lambda: _check_start(resolved, components, resumption, ownership.origin, allow_config_change))

        # From here on the run exists on disk: the loop handles signals
        stop.enter_loop()
        ownership.keep()
        check_shared_directory(world, run, lock := ownership.acquire())
        generation = ownership.begin_generation(config, resumption)
        rank0(lambda: note_generation(run, generation, to_step=resolved.trainer.steps))
        _log_to_run(config, run, world, threads)
        origin = ownership.origin
        context = RunContext(resolved, config, world, run, lock, generation, resumption, stop, origin, on_log)
        result = _train(context, components)
        if world.is_first and config.output.sync_uri:
            sync_finished(run, config.output.sync_uri)
        return result


def _check_before_joining(config: Config) -> ProcessInfo:
    """Check what needs no other process, so that nothing waits for them in vain."""
    process = current_process_info(config.distributed)
    micro_batches_in_step(config, process.world_size)
    if config.output.sync_uri:
        check_sync_installed("output.sync_uri is set")
    return process


def _check_start(
    config: Config, components: Components, resumption: Resumption | None, origin: Origin | None, allow_change: bool
) -> None:
    """Refuse a checkpoint of other data, or weights of another model."""
    if resumption:
        check_recorded(resumption, components.recorded, allow_change)
        check_not_past(resumption, config)
    if origin:
        check_architecture(origin, config, components.recorded)


def _open_run(
    config: Config, resume: str | None, world: World, stack: ExitStack, start_from: str | None
) -> tuple[RunDirectory, RunOwnership, Resumption | None]:
    """An existing run, locked, with the checkpoint to resume from; or the directory that a new run will get."""
    rank0 = world.control.on_rank0
    resume = resume or ("auto" if is_restart() else None)
    existing = rank0(lambda: find_resumed_run(config, resume) if resume else None)
    if existing and start_from and not config.output.run_id and is_restart():
        existing = None if existing.run_id == Path(split_reference(start_from)[0]).name else existing
    if existing is None:
        run = rank0(lambda: new_run(config.output.root_dir, config.output.run_id, config.run.name)).absolute()
        ownership = RunOwnership(stack, run, world, is_new=True)
        ownership.origin = rank0(lambda: resolve_origin(config, start_from, None))
        return run, ownership, None
    run = existing.absolute()
    ownership = RunOwnership(stack, run, world, is_new=False)
    ownership.acquire()  # first: another owner could prune the checkpoint that is chosen next
    resumption = rank0(lambda: find_resumption(existing, _resume_reference(existing, resume)))
    ownership.origin = rank0(lambda: resolve_origin(config, start_from, resumption))
    return run, ownership, resumption


def _resume_reference(run: RunDirectory, resume: str | None) -> str:
    """What to resume from. After a restart that is the newest checkpoint, once an earlier start by the same command
    has loaded the checkpoint that was named; before that, newer checkpoints are the ones to be replaced."""
    if is_restart() and has_restored(run):
        return "auto"
    return resume or "auto"


def _build_components(config: Config, world: World, numerics: Numerics) -> Components:
    """Data and model, the same on every rank."""
    phase("reading data")
    inject_fault("prepare", 0)
    set_up_torch(config)
    components = world.control.all_or_none(lambda: build_components(config, world, numerics))
    check_same_data_and_model(world, components)
    base = world.control.on_rank0(lambda: base_sha256(config, components.adapter))
    components.recorded["base_sha256"] = base
    return components


def _log_to_run(config: Config, run: RunDirectory, world: World, threads: str) -> None:
    path = run.logs / (config.logging.file_name if world.is_first else f"rank-{world.rank}.log")
    setup_logging(config.logging, path if config.logging.log_to_file else None)
    if not world.is_first and world.local_rank == 0 and not config.logging.all_ranks:  # else a pod's log is empty
        place = f"in {run.shown(path)}" if config.logging.log_to_file else "not written (logging.log_to_file)"
        log_on_every_rank(
            "DDP", f"the log of rank {world.rank} is {place}; set logging.all_ranks to show it here as well"
        )
    if world.is_joined:
        log("DDP", f"rank {world.rank} of {world.world_size} on {world.device}, {threads}")
    else:
        log("SETUP", f"device {world.device}, {threads}")


def _train(context: RunContext, components: Components) -> TrainResult:
    config, world = context.config, context.world
    store = CheckpointStore(context.run.checkpoints)
    model = build_model(config, world, components)
    optimizer = build_optimizer(config, world, model)
    progress = world.control.all_or_none(lambda: restore(context.resumption, store, model.module, optimizer, world))
    if context.origin:
        origin = context.origin
        world.control.all_or_none(lambda: load_weights(origin, model.module))
    world.control.on_rank0(lambda: _record_start(context, components, progress.step))
    tracker = _open_tracker(context, components, model, progress)
    status: Status = "failed"
    result: TrainResult | None = None
    try:
        _prepare_interrupt(context, tracker, progress)
        trainer = _build_trainer(context, components, store, model, optimizer, progress, tracker)
        if context.resumption and world.is_first:
            with suppress(OSError):
                trainer.repair_artifacts()
        started = time.perf_counter()
        with trainer.watchdog, peer_errors(), closing(trainer.stream):
            trainer.fit()
            inject_fault("after_final_save", progress.step)
            finished = build_result(context, trainer, time.perf_counter() - started)
            # No rank exits with 0 before the run is finished: a platform would not restart it.
            result = world.control.on_rank0(lambda: publish_result(context, finished, trainer.artifacts))
        status = "finished"
        return result
    except Interrupted as error:
        status = _interrupted_status(error)
        _add_resume_hint(context, error, progress.step)
        raise
    finally:
        _end_run(context, tracker, status, progress, result)


def _record_start(context: RunContext, components: Components, from_step: int) -> None:
    clear_heartbeats(context.run.heartbeats, context.generation)
    note_generation(context.run, context.generation, restored=True)
    write_run_files(context, components, from_step)


def _open_tracker(context: RunContext, components: Components, model: ModelHandle, progress: TrainState) -> Tracker:
    config, world = context.config, context.world
    parameters, trainable = parameter_count(model.module), trainable_count(model.module)
    tokens_per_step = round(components.train_batches.tokens_per_step)
    of_them = f" ({trainable:,} of them trained, {trainable / parameters:.2%})" if trainable < parameters else ""
    log(
        "TRAIN",
        f"run {context.run.run_id}: {parameters:,} parameters{of_them}, {components.train_batches.tokens:,} training "
        f"tokens, {tokens_per_step:,} tokens per step, from step {progress.step} to {config.trainer.steps}",
    )
    facts = {
        "parameters": parameters,
        "trainable_parameters": trainable,
        "tokens_per_step": tokens_per_step,
        "steps": config.trainer.steps,
        "device": str(world.device),
        "world_size": world.world_size,
    }
    tracked = TrackedRun(context.run, config, progress.step, progress.evaluated_step, facts)
    # Other ranks log to their own files and, with logging.all_ranks, to standard error.
    tracker = open_trackers(tracked) if world.is_first else ConsoleTracker(tracked, may_show_bar=False)
    return CallbackTracker(tracker, context.on_log) if world.is_first and context.on_log else tracker


def _build_trainer(
    context: RunContext,
    components: Components,
    store: CheckpointStore,
    model: ModelHandle,
    optimizer: torch.optim.Optimizer,
    progress: TrainState,
    tracker: Tracker,
) -> Trainer:
    config, world, run, generation = context.config, context.world, context.run, context.generation
    starts = [start for start in set(world.control.gather(os.environ.get(START, ""))) if start]
    watchdog = Watchdog(run.heartbeats, world, generation, config.distributed.timeout_sec, starts)
    share = MicroBatchRange.of_rank(world.rank, world.world_size, components.micro_batches)
    end = max(progress.step, config.trainer.steps)
    numbers = MicroBatchNumbers(progress.step, end, components.micro_batches, share.first, share.count)
    artifacts = Artifacts(config, run, model.adapter, components.recorded["base_sha256"])
    return Trainer(
        context=context,
        components=components,
        stepper=Stepper(model, optimizer, world, config.run.seed, config.trainer.max_grad_norm, watchdog.tick),
        stream=components.train_batches.stream(numbers, config.data.num_workers, world.device.type == "cuda"),
        share=share,
        saver=Saver(
            store,
            context.lock,
            world,
            config.trainer.keep_checkpoints,
            config.trainer.async_save,
            artifacts,
            on_first_save=lambda: note_generation(run, generation, saved=True),
        ),
        artifacts=artifacts,
        eval_prompts=EvalPrompts(config, run, model, components.prepared, world),
        watchdog=watchdog,
        tracker=tracker,
        throughput=Throughput(world.device, model.adapter.flops_per_token(model.module), world.world_size),
        progress=progress,
        saved=(progress.step, progress.evaluated_step),
    )


def _interrupted_status(error: Interrupted) -> Status:
    if isinstance(error, PeerLost):
        return "failed"
    return "superseded" if isinstance(error, Superseded) else "stopped"


def _prepare_interrupt(context: RunContext, tracker: Tracker, progress: TrainState) -> None:
    """What a signal shows and, if it is a second Ctrl-C, leaves behind."""
    stop, world = context.stop, context.world
    stop.remedy = _resume_hint(context)
    if is_live():
        stop.show = tracker.activity
    if world.is_first:
        stop.before_leaving = lambda: end_generation(context.run, context.generation, "stopped", progress.step)


def _resume_hint(context: RunContext) -> str:
    run = context.run
    is_default_root = context.config.output.root_dir == OutputSection().root_dir
    command = f"train --resume {run.run_id if is_default_root else run.shown()}"
    return f"Resume with: llmtrain {f'resume {run.run_id}' if LAUNCH in os.environ else command}"


def _add_resume_hint(context: RunContext, error: Interrupted, step: int) -> None:
    run = context.run
    if _interrupted_status(error) == "stopped":
        error.remedy = _resume_hint(context)
    error.details = {**error.details, "run_id": run.run_id, "run_dir": str(run.shown()), "steps": step}


def _end_run(
    context: RunContext, tracker: Tracker, status: Status, progress: TrainState, result: TrainResult | None
) -> None:
    """Report how the run ended: to the trackers, in generations.json and in the log."""
    if not owns_run(context.lock):
        status = "superseded"  # another process owns the run now and reports on it
    if context.world.is_first and status != "superseded":
        with suppress(OSError):  # a full disk must not hide the error that ended the run
            end_generation(context.run, context.generation, status, progress.step)
    if context.world.is_first and status == "finished" and context.config.output.report:
        write_report(context.run)  # before the trackers end, which upload it
    tracker.finish(status, result)
    if status in ("finished", "stopped"):
        # A launcher ends the other processes as soon as one exits: rank 0 may still be sending metrics.
        with suppress(Exception):
            context.world.control.barrier()
    if status == "finished" and result:
        log(
            "DONE",
            f"{progress.step} steps, train loss {result['final_train_loss']:.4f}, "
            f"val loss {result['final_val_loss']:.4f}, best {result['best_val_loss']:.4f}",
        )
    setup_logging(context.config.logging)  # closes the run's log file
