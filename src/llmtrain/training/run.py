"""Trains a config to its end: run_training assembles the run from top to bottom, in the order in which it happens."""

import os
import time
from contextlib import ExitStack, closing, suppress

import torch

from llmtrain.checkpoint.artifacts import Artifacts
from llmtrain.checkpoint.saver import Saver
from llmtrain.checkpoint.state import TrainState
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.check_plugins import describe_plugins
from llmtrain.config.data import DummyTextSection
from llmtrain.config.document import dump_document
from llmtrain.config.logging import LoggingSection
from llmtrain.config.schema import Config
from llmtrain.config.trainer import TrainerSection
from llmtrain.core import fault_injection
from llmtrain.core.env import START
from llmtrain.core.fault_injection import inject_fault
from llmtrain.core.files import write_atomic, write_json
from llmtrain.core.logs import log, log_on_every_rank, setup_logging
from llmtrain.core.progress import ProgressMode, progress_mode
from llmtrain.core.redact import redact_values
from llmtrain.data.batches import MicroBatchNumbers
from llmtrain.data.tokenizers.load import replace_saved_tokenizer, saved_sha256
from llmtrain.distributed.batch_split import MicroBatchRange, micro_batches_in_step
from llmtrain.distributed.control_group import peer_errors
from llmtrain.distributed.world import World, current_process_info, join_world
from llmtrain.errors import Interrupted, JoinError
from llmtrain.models.base import parameter_count, trainable_count
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.generations import end_generation, note_generation
from llmtrain.runs.heartbeats import clear_heartbeats
from llmtrain.runs.metadata import collect_metadata
from llmtrain.runs.progress_lines import log_done
from llmtrain.runs.result import TrainResult
from llmtrain.runs.state import EndStatus
from llmtrain.runs.sync import check_installed as check_sync_installed
from llmtrain.runs.sync import sync_finished
from llmtrain.runs.view import RunView
from llmtrain.tracking.base import CallbackTracker, OnLog, TrackedRun, Tracker
from llmtrain.tracking.console import ConsoleTracker
from llmtrain.tracking.open import open_trackers
from llmtrain.training.components import Components, build_on_all_ranks
from llmtrain.training.context import RunContext
from llmtrain.training.eval_prompts import EvalPrompts
from llmtrain.training.eval_tasks import EvalTasks
from llmtrain.training.known_statistics import known_statistics
from llmtrain.training.loop import Trainer
from llmtrain.training.mixture import check_sources, with_recorded_weights
from llmtrain.training.model_handle import ModelHandle, build_model
from llmtrain.training.optimizer import build_optimizer
from llmtrain.training.origin import check_architecture, load_weights
from llmtrain.training.ownership import RunOwnership, may_be_restarted, open_run, owns_run
from llmtrain.training.predicted import predicted
from llmtrain.training.result import (
    build_result,
    complete_finished,
    find_finished_run,
    finished_result,
    publish_result,
    write_report,
)
from llmtrain.training.resume import (
    Resumption,
    attention_of,
    check_config,
    check_data_types,
    check_not_past,
    check_recorded,
    recorded_numerics,
    recorded_threads,
    restore,
)
from llmtrain.training.resume_hint import add_resume_hint, interrupted_status, prepare_interrupt
from llmtrain.training.schedule import max_steps_of, warn_if_short
from llmtrain.training.shutdown import StopFlag
from llmtrain.training.start_up import starting_up
from llmtrain.training.step import Stepper
from llmtrain.training.step_zero import prepare_references
from llmtrain.training.storage_errors import explain_storage_errors
from llmtrain.training.throughput import Throughput, device_name
from llmtrain.training.torch_settings import resolve_threads
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
    began = time.perf_counter()
    setup_logging(config.logging)
    with ExitStack() as stack:
        stack.enter_context(progress_mode(progress))
        stack.enter_context(explain_storage_errors(config.output.root_dir))
        stop = stop or stack.enter_context(StopFlag())

        # What needs no other process, so that nothing waits for them in vain
        process = current_process_info(config.distributed)
        micro_batches_in_step(config.trainer, config.distributed, process.world_size)
        if config.output.sync_uri:
            check_sync_installed("output.sync_uri is set")
        if finished := find_finished_run(config, resume, process):
            return finished

        # The world; what has to be decided is decided by rank 0 for all
        try:
            world = stack.enter_context(join_world(config.distributed, config.run))
        except JoinError:
            # Another start may have finished the run meanwhile: processes that see it do not join.
            if finished := find_finished_run(config, resume, process):
                return finished
            raise
        stop.joined()
        stack.enter_context(peer_errors())
        fault_injection.set_rank(world.rank)
        rank0 = world.control.on_rank0

        # The run directory, and the checkpoint to resume from
        ownership = open_run(config.output, config.run.name, world, stack, resume, start_from)
        run = ownership.run
        resumption = ownership.resumption
        config, threads = rank0(lambda: _with_recorded_values(config, resumption, world))
        if resumption:
            data = rank0(lambda: with_recorded_weights(config.data, resumption.checkpoint, allow_config_change))
            config = config.model_copy(update={"data": data})
            rank0(lambda: check_config(resumption, config, world.world_size, allow_config_change))
            if result := rank0(lambda: finished_result(config, resumption, allow_config_change)):
                if world.is_first:
                    complete_finished(config.output, config.tracking.mlflow, run)
                return result
        if may_be_restarted():
            ownership.begin_generation(config.run.threads)  # already now, to count crashes while data is prepared

        # Data and model
        start_up = stack.enter_context(starting_up(config, world, began))
        components = build_on_all_ranks(config, world, rank0(lambda: recorded_numerics(resumption)))
        resolved = config.with_values("trainer", max_steps=max_steps_of(config.trainer, components.train_batches))
        rank0(lambda: _check_start(resolved.trainer, components, ownership, allow_config_change))
        rank0(lambda: check_sources(config.data, components.train_batches, resolved.trainer.steps))

        # From here on the run exists on disk: the loop handles signals
        stop.enter_loop()
        ownership.keep()
        lock = ownership.acquire()
        ownership.check_shared_directory()
        generation = ownership.begin_generation(config.run.threads)
        rank0(lambda: note_generation(run, generation, to_step=resolved.trainer.steps))
        _log_to_run(config.logging, run, world, threads)
        warn_if_short(resolved.trainer, is_smoke_test=isinstance(config.data, DummyTextSection))
        context = RunContext(
            resolved, config, world, run, lock, generation, resumption, stop, start_up, ownership.origin, on_log
        )
        result = _train(context, components)
        if world.is_first and config.output.sync_uri:
            sync_finished(run, config.output.sync_uri)
        return result


def _with_recorded_values(config: Config, resumption: Resumption | None, world: World) -> tuple[Config, str]:
    """The config with the attention and the number of threads that the run has had, and a text with that number."""
    if resumption and getattr(config.model, "attention", None) == "auto":
        config = config.with_values("model", attention=attention_of(resumption))
    threads, source = resolve_threads(config.run, recorded_threads(resumption), world.local_world_size)
    return config.with_values("run", threads=threads), f"CPU threads: {threads} ({source})"


def _check_start(trainer: TrainerSection, components: Components, ownership: RunOwnership, allow_change: bool) -> None:
    """Refuse a checkpoint of other data, or weights of another model."""
    resumption = ownership.resumption
    if resumption:
        check_recorded(resumption, components.recorded, allow_change)
        check_data_types(resumption, components.module, allow_change)
        check_not_past(resumption, trainer)
    if ownership.origin:
        check_architecture(ownership.origin, components.recorded)


def _log_to_run(logging: LoggingSection, run: RunDirectory, world: World, threads: str) -> None:
    path = run.logs / (logging.file_name if world.is_first else f"rank-{world.rank}.log")
    setup_logging(logging, path if logging.log_to_file else None)
    if not world.is_first and world.local_rank == 0 and not logging.all_ranks:  # else a pod's log is empty
        place = f"in {run.shown(path)}" if logging.log_to_file else "not written (logging.log_to_file)"
        log_on_every_rank(
            "DDP", f"the log of rank {world.rank} is {place}; set logging.all_ranks to show it here as well"
        )
    if world.is_joined:
        log("DDP", f"rank {world.rank} of {world.world_size} on {world.device}, {threads}")
    else:
        log("SETUP", f"device {world.device}, {threads}")


def _train(context: RunContext, components: Components) -> TrainResult:
    config = context.config
    world = context.world
    store = CheckpointStore(context.run.checkpoints)
    model = build_model(components, config.trainer, config.distributed, world)
    optimizer = build_optimizer(
        model.adapter, model.module, config.trainer, world, config.distributed.reproducible_reduce
    )
    if context.origin:
        origin = context.origin
        world.control.all_or_none(lambda: load_weights(origin, model.module))
    if context.resumption is None or context.resumption.checkpoint is None:
        world.control.on_rank0(lambda: _record_config(context))  # it can be resumed from here on
    components = prepare_references(context, components, model)
    state = world.control.all_or_none(lambda: restore(context.resumption, store, model.module, optimizer, world))
    world.control.on_rank0(lambda: _record_start(context, components, state.step))
    tracker = _open_tracker(context, components, model, state)
    status = EndStatus.FAILED
    result: TrainResult | None = None
    try:
        prepare_interrupt(context, tracker, state)
        trainer = _build_trainer(context, components, store, model, optimizer, state, tracker)
        if context.resumption and world.is_first:
            with suppress(OSError):
                trainer.repair_artifacts()
        started = time.perf_counter()
        with trainer.watchdog, peer_errors(), closing(trainer.stream):
            trainer.fit()
            inject_fault("after_final_save", state.step)
            finished = build_result(context, trainer, time.perf_counter() - started)
            # No rank exits with 0 before the run is finished: a platform would not restart it.
            result = world.control.on_rank0(lambda: publish_result(context, finished, trainer.artifacts))
        status = EndStatus.FINISHED
        return result
    except Interrupted as error:
        status = interrupted_status(error)
        add_resume_hint(context, error, state.step)
        raise
    finally:
        _end_run(context, tracker, status, state, result)


def _record_config(context: RunContext) -> None:
    config = context.requested_config
    if config.output.save_config_copy:
        recorded = config.with_values("output", run_id=context.run.run_id)
        write_atomic(context.run.config, dump_document(redact_values(recorded.as_dict())))


def _record_start(context: RunContext, components: Components, from_step: int) -> None:
    """Write the files that describe the run: config.yaml, meta.json, the tokenizer and the model's config. A resumed
    run keeps the metadata of its first start and, after its first checkpoint, its tokenizer."""
    config = context.requested_config
    run = context.run
    clear_heartbeats(run.heartbeats, context.generation)
    note_generation(
        run,
        context.generation,
        restored=True,
        device_name=device_name(context.world.device),
        predicted=predicted(context, components.adapter),
    )
    meta = RunView(run).meta
    if config.output.save_meta_json and "run_id" not in meta:
        metadata = collect_metadata(run.run_id, config.run.name, str(context.world.device))
        plugins = describe_plugins(config)
        if plugins:
            metadata["plugins"] = plugins
        metadata["numerics"] = components.recorded["numerics"]
        metadata |= known_statistics(config.data, config.model.block_size, components.recorded)
        write_json(run.meta, {**metadata, **meta})  # a run that starts from another one has recorded its origin
    _record_config(context)
    if from_step == 0 or saved_sha256(run.tokenizer) != components.recorded["tokenizer_sha256"]:
        replace_saved_tokenizer(components.prepared.tokenizer, run.tokenizer)
    for path in components.adapter.config_files():  # the base model may be deleted before the run is used
        run.model_config.mkdir(exist_ok=True)
        write_atomic(run.model_config / path.name, path.read_text(encoding="utf-8"))


def _open_tracker(context: RunContext, components: Components, model: ModelHandle, state: TrainState) -> Tracker:
    config = context.config
    world = context.world
    parameters = parameter_count(model.module)
    trainable = trainable_count(model.module)
    tokens_per_step = round(components.train_batches.tokens_per_step)
    trained = ""
    if trainable < parameters:
        trained = f" ({trainable:,} of them trained, {trainable / parameters:.2%})"
    log(
        "TRAIN",
        f"run {context.run.run_id}: {parameters:,} parameters{trained}, {components.train_batches.tokens:,} training "
        f"tokens, {tokens_per_step:,} tokens per step, from step {state.step} to {config.trainer.steps}",
    )
    facts = {
        "parameters": parameters,
        "trainable_parameters": trainable,
        "tokens_per_step": tokens_per_step,
        "steps": config.trainer.steps,
        "device": str(world.device),
        "world_size": world.world_size,
    }
    tracked = TrackedRun(context.run, config, state.step, state.evaluated_step, facts)
    if not world.is_first:
        # Other ranks log to their own files and, with logging.all_ranks, to standard error.
        return ConsoleTracker(tracked, may_show_bar=False)
    tracker = open_trackers(tracked)
    return CallbackTracker(tracker, context.on_log) if context.on_log else tracker


def _build_trainer(
    context: RunContext,
    components: Components,
    store: CheckpointStore,
    model: ModelHandle,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    tracker: Tracker,
) -> Trainer:
    config = context.config
    trainer = config.trainer
    world = context.world
    run = context.run
    starts = set(world.control.gather(os.environ.get(START, ""))) - {""}
    watchdog = Watchdog(run.heartbeats, world, context.generation, config.distributed.timeout_sec, sorted(starts))
    share = MicroBatchRange.of_rank(world.rank, world.world_size, components.micro_batches)
    end = max(state.step, trainer.steps)
    numbers = MicroBatchNumbers(state.step, end, components.micro_batches, share.first, share.count)
    artifacts = Artifacts(config, run, model.adapter, components.recorded["base_sha256"])

    def on_micro_batch(step: int, number: int, count: int) -> None:
        watchdog.tick()
        tracker.micro_batch(step, number, count)

    return Trainer(
        context=context,
        components=components,
        stepper=Stepper(model, optimizer, world, config.run.seed, trainer, on_micro_batch),
        stream=components.train_batches.stream(numbers, config.data.num_workers, world.device.type == "cuda"),
        share=share,
        saver=Saver(
            store,
            context.lock,
            world,
            trainer.keep_checkpoints,
            trainer.async_save,
            artifacts,
            on_first_save=lambda: note_generation(run, context.generation, saved=True),
        ),
        artifacts=artifacts,
        eval_prompts=EvalPrompts(config, run, model, components.prepared, world),
        eval_tasks=EvalTasks(config, run, model, components.prepared, world, components.tasks),
        watchdog=watchdog,
        tracker=tracker,
        throughput=Throughput(world.device, model.adapter.flops_per_token(model.module), world.world_size),
        state=state,
        saved=(state.step, state.evaluated_step),
    )


def _end_run(
    context: RunContext, tracker: Tracker, status: EndStatus, state: TrainState, result: TrainResult | None
) -> None:
    """Report how the run ended: to the trackers, in generations.json and in the log."""
    if not owns_run(context.lock):
        status = EndStatus.SUPERSEDED  # another process owns the run now and reports on it
    if context.world.is_first and status != EndStatus.SUPERSEDED:
        with suppress(OSError):  # a full disk must not hide the error that ended the run
            end_generation(context.run, context.generation, status, state.step)
    if context.world.is_first and status == EndStatus.FINISHED and context.config.output.report:
        write_report(context.run)  # before the trackers end, which upload it
    tracker.finish(status, result.values if result else None)
    if status in (EndStatus.FINISHED, EndStatus.STOPPED):
        # A launcher ends the other processes as soon as one exits: rank 0 may still be sending metrics.
        with suppress(Exception):
            context.world.control.barrier()
    if status == EndStatus.FINISHED and result:
        log_done(state.step, result.final_train_loss, result.final_val_loss, result.best_val_loss)
    setup_logging(context.config.logging)  # closes the run's log file
