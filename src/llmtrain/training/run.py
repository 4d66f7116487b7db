"""Assembles a training run, in order, from a config; and the two ways in: run_training and dry_run."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from llmtrain import fault_injection as faults
from llmtrain.checkpoint.saver import Saver
from llmtrain.checkpoint.state import model_tensors, optimizer_tensors, state_sha256
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.document import dump_document
from llmtrain.config.schema import Config
from llmtrain.data.batches import MicroBatchNumbers
from llmtrain.data.store.example_store import ExampleStore
from llmtrain.data.tokenizers.tokenizer import replace_saved_tokenizer, saved_sha256
from llmtrain.distributed.batch_split import Share, micro_batches_in_step
from llmtrain.distributed.control_group import peer_errors
from llmtrain.distributed.parallel import ParallelModel
from llmtrain.distributed.world import World, join_world, pick_device, process_info_here
from llmtrain.env import LAUNCH, NODE, START
from llmtrain.errors import DataError, Interrupted, LlmtrainError, PeerLost, Superseded, TrainingFailed, UsageError
from llmtrain.fault_injection import inject_fault
from llmtrain.files import disk_full, is_full, read_json, write_atomic, write_json
from llmtrain.logs import log, log_on_every_rank, set_rank, setup_logging, warn
from llmtrain.models.base import parameter_count, trainable_count
from llmtrain.redact import redact, redact_values
from llmtrain.runs.directory import RunDirectory, new_run
from llmtrain.runs.generations import begin_generation, end_generation, has_restored, note_generation
from llmtrain.runs.heartbeats import clear_heartbeats
from llmtrain.runs.lock import STALE_AFTER_SEC, NullLock, RunLock, is_held
from llmtrain.runs.metadata import collect_metadata
from llmtrain.runs.sync import check_installed as check_sync_installed
from llmtrain.runs.sync import sync_finished
from llmtrain.tracking.base import Status, TrackedRun
from llmtrain.tracking.console import ConsoleTracker
from llmtrain.tracking.mlflow import is_complete, tracking_location
from llmtrain.tracking.replay import replay_run
from llmtrain.training.artifacts import Outputs
from llmtrain.training.build import (
    Components,
    as_computed,
    autocast_for,
    base_sha256,
    build_components,
    build_stepper,
    open_trackers,
    resolve_steps,
    resolve_threads,
    set_up_torch,
    wrap,
)
from llmtrain.training.loop import Trainer
from llmtrain.training.optim import build_optimizer
from llmtrain.training.resume import (
    Resumption,
    TrainResult,
    already_finished,
    check_config,
    check_not_past,
    check_recorded,
    find_resumed_run,
    find_resumption,
    restore,
    wanted,
)
from llmtrain.training.sample import sample_text
from llmtrain.training.shutdown import StopFlag
from llmtrain.training.throughput import Throughput, peak_memory_bytes
from llmtrain.training.watchdog import Watchdog

SAMPLE_TOKENS = 300
SAMPLE_SEC = 10.0
SEE_SEC = 10.0
_STORAGE = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
        errno.EPERM,
        errno.EROFS,
    }
)
"""Errors of storage that starting again does not help; those of the network are none of them."""


def run_training(
    config: Config, resume: str | None = None, allow_config_change: bool = False, stop: StopFlag | None = None
) -> TrainResult | None:
    """Train, or go on training, to the end of the run. Rank 0 gets the result, which is what `train --json` prints.
    What has to be decided is decided by rank 0 for all."""
    setup_logging(config.logging)
    with ExitStack() as stack:
        stack.enter_context(explain_storage(config))
        stop = stop or stack.enter_context(StopFlag())
        micro_batches_in_step(
            config, process_info_here(config.distributed).world_size
        )  # a mistake shows before any waiting
        if config.output.sync_uri:
            check_sync_installed("output.sync_uri is set")
        is_over, done = finished_before(config, resume)
        if is_over:
            return _finished_before(config, find_resumed_run(config, resume or "auto"), done)
        world = stack.enter_context(join_world(config.distributed, config.run))
        stop.joined()
        stack.enter_context(peer_errors())
        faults.set_rank(world.rank)
        rank0 = world.control.on_rank0
        wanted = resume or ("auto" if is_restart() else None)
        existing = rank0(lambda: find_resumed_run(config, wanted) if wanted else None)
        run = existing or rank0(lambda: new_run(config.output.root_dir, config.output.run_id, config.run.name))
        resumption = None
        if existing:
            lock = take_lock(stack, run, world)  # first: the checkpoint chosen next must not be pruned by its owner
            resumption = rank0(lambda: find_resumption(run, resumed_reference(run, wanted)))
        config, threads_source = rank0(lambda: resolve_threads(config, resumption, world))
        if resumption:
            rank0(lambda: check_config(resumption, config, allow_config_change))
            done = rank0(lambda: already_finished(config, resumption, allow_config_change))
            if done:
                return _finished_before(config, run, done if world.is_first else None)
        generation, may_forget = None, [True]
        if may_be_restarted():  # then a crash while data is prepared counts too
            if not existing:
                create_new(stack, run, world)
                stack.push(forget_unless_crashed(run, world, may_forget))
                lock = take_lock(stack, run, world)
            generation = begin(stack, run, resumption, world, lock, config, None)
        inject_fault("prepare", 0)
        set_up_torch(config)
        parts = world.control.all_or_none(lambda: build_components(config, world))
        data = f"{parts.prepared.fingerprint} {parts.recorded['tokenizer_sha256']}"
        check_same_on_all_ranks(world, "data", data, "Give every process the same files.")
        check_same_on_all_ranks(world, "base model", base_sizes(parts), "Give every process the same model directory.")
        parts.recorded["base_sha256"] = rank0(lambda: base_sha256(config, parts.adapter))
        if resumption:
            rank0(lambda: check_recorded(resumption, parts.recorded, allow_config_change))
        settled = resolve_steps(config, parts.train_batches)
        if resumption:
            rank0(lambda: check_not_past(resumption, settled))
        stop.enter_loop()  # from here on there is something on disk: a signal waits for the loop
        may_forget.clear()
        if not existing and generation is None:
            create_new(stack, run, world)
            lock = take_lock(stack, run, world)
        check_shared(world, run, lock)
        steps = settled.trainer.steps
        if generation is None:
            generation = begin(stack, run, resumption, world, lock, settled, steps)
        number = generation
        rank0(lambda: note_generation(run, number, to_step=steps))
        log_name = config.logging.file_name if world.is_first else f"rank-{world.rank}.log"
        setup_logging(config.logging, run.logs / log_name if config.logging.log_to_file else None)
        if not world.is_first and world.local_rank == 0 and not config.logging.all_ranks:  # else a pod's log is empty
            where = f"{run.logs / log_name}" if config.logging.log_to_file else "kept nowhere (logging.log_to_file)"
            log_on_every_rank("DDP", f"the log of rank {world.rank} is {where}; logging.all_ranks shows it here too")
        threads = f"CPU threads: {config.run.threads} ({threads_source})"
        log("DDP", f"rank {world.rank} of {world.world_size} on {world.device}, {threads}")
        result = _train(settled, config, world, run, resumption, parts, lock, stop, generation)
        return _copied(config, run, result)


def _finished_before(config: Config, run: RunDirectory | None, result: TrainResult | None) -> TrainResult | None:
    """Its process may have been killed while it told MLflow: that gets the rest now."""
    if result and run and config.tracking.mlflow.enabled and not is_complete(run):
        try:
            replay_run(run, tracking_location(config)[0])
        except LlmtrainError as problem:
            warn("TRAIN", f"MLflow may lack some of run {run.run_id}: {problem.what}")
    return _copied(config, run, result)


def _copied(config: Config, run: RunDirectory | None, result: TrainResult | None) -> TrainResult | None:
    """Rank 0 of a run that has finished copies it; again where it had finished before, as its process may have been
    killed while it copied."""
    if result and run and config.output.sync_uri:
        sync_finished(run, config.output.sync_uri)
    return result


def base_sizes(parts: Components) -> str:
    return str([(path.name, path.stat().st_size) for path in parts.adapter.base_files()])


def finished_before(config: Config, resume: str | None) -> tuple[bool, TrainResult | None]:
    """A finished run needs no other process: a pod that is started again must not wait for those that ended well.
    Rank 0 has the result."""
    if not is_unattended() or not config.output.run_id or resume != "auto":
        return False, None
    run = find_resumed_run(config, resume)
    process = process_info_here(config.distributed)
    set_rank(process.rank, process.world_size)
    result = already_finished(config, Resumption(run, None, False)) if run else None
    set_rank(0, 1)
    return result is not None, result if process.rank == 0 else None


def create(run: RunDirectory) -> None:
    try:
        run.create()
    except UsageError:
        if not is_unattended() or not run.exists():
            raise
        raise PeerLost(
            f"Another start of run '{run.run_id}' has made its directory in the meantime.",
            remedy="Start it again: it goes on with that run.",
        ) from None


def create_new(stack: ExitStack, run: RunDirectory, world: World) -> None:
    """The directory of a new run; a full disk leaves none behind."""
    world.control.on_rank0(lambda: create(run))
    if world.is_first:
        stack.push(lambda _, error, __: remove_if_empty(run) if is_full(error) else None)


@contextmanager
def explain_storage(config: Config) -> Iterator[None]:
    """Whatever the run could not read or write: mostly that is for the user to fix (65). What may pass by itself, such
    as an NFS server that is away, is a crash to start again from."""
    try:
        yield
    except OSError as problem:
        path = problem.filename2 or problem.filename
        why = problem.strerror or str(problem)
        if is_full(problem):
            where = Path(config.output.root_dir).expanduser()
            raise disk_full(where, f"{why} ({path})" if path else why) from None
        may_pass = problem.errno in (errno.EIO, errno.ESTALE)
        if problem.errno not in _STORAGE and not may_pass:
            raise
        raise (LlmtrainError if may_pass else TrainingFailed)(
            f"{path or config.output.root_dir} cannot be read or written: {why}.",
            remedy="Check the storage, and that nothing else has the name of a file or directory of the run. Then "
            "resume the run with --resume.",
        ) from None


def remove_if_empty(run: RunDirectory) -> None:
    """Take back a new run directory that holds nothing yet: no checkpoint, no metrics."""
    has_metrics = run.metrics.is_file() and run.metrics.stat().st_size
    if not has_metrics and not CheckpointStore(run.checkpoints).steps() and not is_held(run.lock):
        shutil.rmtree(run.path, ignore_errors=True)


def forget_unless_crashed(
    run: RunDirectory, world: World, may_forget: list[bool]
) -> Callable[[type[BaseException] | None, BaseException | None, object], None]:
    """Remove a run that was made only to count crashes, where it ends before it has begun for another reason: a
    mistake, or a signal. Nothing is left behind then."""

    def leave(kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        is_crash = isinstance(error, PeerLost) or (kind and issubclass(kind, Exception) and not _is_no_crash(error))
        if world.is_first and may_forget and error is not None and not is_crash and not run.lock.exists():
            with suppress(OSError):
                for path in (run.generations, run.path / ".lock.guard"):
                    path.unlink(missing_ok=True)
                run.path.rmdir()

    return leave


def _is_no_crash(error: BaseException | None) -> bool:
    codes = (UsageError.exit_code, DataError.exit_code, Interrupted.exit_code)
    return isinstance(error, LlmtrainError) and error.exit_code in codes


def resumed_reference(run: RunDirectory, wanted: str | None) -> str:
    """What to resume from. After a restart the newest checkpoint, once a start of the same command has loaded the one
    that was named: before that the newest belongs to the course the run is to leave."""
    if is_restart() and has_restored(run):
        return "auto"
    return wanted or "auto"


def take_lock(stack: ExitStack, run: RunDirectory, world: World) -> NullLock:
    """Rank 0 holds the lock; the others know its token. A launcher's new generation supersedes whoever has it."""
    own: list[NullLock] = []

    def take() -> str:
        # After a restart the lock may be that of a rank 0 that died on another machine: it is stale in a while.
        wait_sec = STALE_AFTER_SEC + 5 if is_restart() else 0.0
        own.append(stack.enter_context(RunLock(run.lock, supersede=is_unattended(), wait_sec=wait_sec)))
        return own[0].token

    token = world.control.on_rank0(take)
    return own[0] if own else NullLock(token)


def is_unattended() -> bool:
    """Started by `llmtrain node`, which may start it again and again with nobody looking."""
    return os.environ.get(NODE) == "1"


def is_restart() -> bool:
    """Started again by an elastic agent, torchrun's or that of `node`, after a crash."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def may_be_restarted() -> bool:
    """By `llmtrain node`'s platform, or by an elastic agent."""
    return is_unattended() or is_restart() or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def check_same_on_all_ranks(world: World, what: str, value: str, remedy: str) -> None:
    values = world.control.gather(value)
    others = [rank for rank, other in enumerate(values) if other != values[0]]
    if others:
        ranks = ", ".join(map(str, others[:10]))
        raise UsageError(f"The {what} of rank {ranks} is not that of rank 0.", remedy=remedy)


def check_shared(world: World, run: RunDirectory, lock: NullLock) -> None:
    """Every rank writes and reads checkpoints, so all must see one run directory."""
    deadline = time.monotonic() + SEE_SEC
    while not (sees := (read_json(run.lock) or {}).get("token") == lock.token) and time.monotonic() < deadline:
        time.sleep(0.1)  # network storage may be late
    seen = world.control.gather(sees)
    blind = [str(rank) for rank, sees in enumerate(seen) if not sees]
    if not seen[0]:  # another generation has taken the run over while data was prepared
        world.control.on_rank0(lock.check)
    if blind:
        raise UsageError(
            f"Rank {', '.join(blind[:10])} does not see {run.path}, which rank 0 has made.",
            remedy="Set output.root_dir to a directory that all nodes share (a ReadWriteMany volume, NFS).",
        )


def _train(
    config: Config,
    as_given: Config,
    world: World,
    run: RunDirectory,
    resumption: Resumption | None,
    parts: Components,
    lock: NullLock,
    stop: StopFlag,
    generation: int,
) -> TrainResult | None:
    store = CheckpointStore(run.checkpoints)
    wrapped, loss = wrap(config, world, parts)
    optimizer = build_optimizer(parts.module, config.trainer)
    progress = world.control.all_or_none(lambda: restore(resumption, store, parts.module, optimizer, world))
    world.control.on_rank0(lambda: describe_start(as_given, run, parts, world, generation, progress.step))
    parameters, trained = parameter_count(parts.module), trainable_count(parts.module)
    tokens_per_step = round(parts.train_batches.tokens_in_step)
    of_them = f" ({trained:,} of them trained, {trained / parameters:.2%})" if trained < parameters else ""
    log(
        "TRAIN",
        f"run {run.run_id}: {parameters:,} parameters{of_them}, {len(parts.prepared.train):,} training tokens, "
        f"{tokens_per_step:,} tokens a step, from step {progress.step} to {config.trainer.steps}",
    )
    facts = {
        "parameters": parameters,
        "trainable_parameters": trained,
        "tokens_per_step": tokens_per_step,
        "steps": config.trainer.steps,
        "device": str(world.device),
        "world_size": world.world_size,
    }
    tracked = TrackedRun(run, config, progress.step, progress.evaluated_step, facts)
    # The lines of other ranks go to their own log files (and, with logging.all_ranks, to standard error).
    tracker = open_trackers(tracked) if world.is_first else ConsoleTracker(tracked, may_show_bar=False)
    throughput = Throughput(world.device, parts.adapter.flops_per_token(parts.module), world.world_size)
    starts = [start for start in set(world.control.gather(os.environ.get(START, ""))) if start]
    watchdog = Watchdog(run.heartbeats, world, generation, config.distributed.timeout_sec, starts)
    end = max(progress.step, config.trainer.steps)
    share = Share.of_rank(world.rank, world.world_size, parts.micro_batches)
    numbers = MicroBatchNumbers(progress.step, end, parts.micro_batches, share.first, share.count)
    batches = parts.train_batches.stream(numbers, config.data.num_workers, world.device.type == "cuda")
    trainer = Trainer(
        config=config.trainer,
        world=world,
        stepper=build_stepper(config, world, parts, wrapped, loss, optimizer, watchdog.tick),
        train_batches=parts.train_batches,
        stream=batches,
        share=share,
        eval_batches=parts.eval_batches,
        saver=Saver(
            store,
            lock,
            world,
            config.trainer.keep_checkpoints,
            config.trainer.async_save,
            note_saved=lambda: note_generation(run, generation, saved=True),
        ),
        outputs=make_outputs(config, run, parts, wrapped, world),
        watchdog=watchdog,
        tracker=tracker,
        progress=progress,
        throughput=throughput,
        lock=lock,
        stop=stop,
        recorded=parts.recorded,
        saved=(progress.step, progress.evaluated_step),
    )
    if resumption and world.is_first:
        with suppress(OSError):
            trainer.repair_outputs()
    started = time.perf_counter()
    status: Status = "failed"
    result: TrainResult | None = None
    try:
        with watchdog, peer_errors(), closing(batches):
            trainer.fit()
            inject_fault("after_final_save", progress.step)
            seconds = time.perf_counter() - started
            result = make_result(config, as_given, run, resumption, parts, trainer, generation, seconds)
            finished = result
            # No rank ends with 0 before the run is finished: a platform would not start it again.
            world.control.on_rank0(lambda: finish(run, lock, finished, trainer.outputs))
        status = "finished"
        return result if world.is_first else None
    except Interrupted as told:
        status = "stopped"
        if isinstance(told, PeerLost):
            status = "failed"
        elif isinstance(told, Superseded):
            status = "superseded"
        else:
            again = f"resume {run.run_id}" if LAUNCH in os.environ else f"train --resume {run.path}"
            told.remedy = f"Go on with: llmtrain {again}"
        told.details = {**told.details, "run_id": run.run_id, "run_dir": str(run.path), "steps": progress.step}
        raise
    finally:
        if not still_ours(lock):
            status = "superseded"  # whatever else went wrong: the run is another's to write about
        tracker.finish(status, result)
        if world.is_first and status != "superseded":
            with suppress(OSError):  # a full disk must not hide what the run ended with
                end_generation(run, generation, status, progress.step)
        if status in ("finished", "stopped"):
            leave_together(world)
        if status == "finished" and result:
            log(
                "DONE",
                f"{progress.step} steps, train loss {progress.last_train_loss:.4f}, "
                f"val loss {progress.last_val_loss:.4f}, best {result['best_val_loss']:.4f}",
            )
        setup_logging(config.logging)  # lets go of the run's log file


def make_outputs(config: Config, run: RunDirectory, parts: Components, wrapped: ParallelModel, world: World) -> Outputs:
    module = wrapped.module if wrapped.is_sharded else parts.module
    autocast = autocast_for(config, world)
    base = parts.recorded["base_sha256"]
    return Outputs(config, run, parts.adapter, module, parts.prepared, world, autocast, base)


def make_result(
    config: Config,
    as_given: Config,
    run: RunDirectory,
    resumption: Resumption | None,
    parts: Components,
    trainer: Trainer,
    generation: int,
    seconds: float,
) -> TrainResult:
    """What `train --json` prints. All ranks take part: a sharded model is put together tensor by tensor."""
    world, progress, throughput = trainer.world, trainer.progress, trainer.throughput
    groups = model_tensors(parts.module), optimizer_tensors(parts.module, trainer.stepper.optimizer)
    with autocast_for(config, world)():
        told_to_stop = sampling_stop(world, trainer.stop, trainer.watchdog)
        sample = write_sample(trainer.outputs, told_to_stop)
    best = CheckpointStore(run.checkpoints).best()
    if best and best.step != progress.best_step and world.is_first:
        warn(
            "SAVE",
            f"the best evaluation was that of step {progress.best_step} ({progress.best_val_loss:.4f}), of which there "
            f"is no checkpoint; the best one there is {best.path.name} ({best.val_loss:.4f})",
        )
    return {
        "run_id": run.run_id,
        "run_dir": str(run.path),
        "status": "finished",
        "steps": progress.step,
        "epochs": progress.epoch,
        "stopped_early": trainer.stopped_early,
        "wanted": wanted(as_given.trainer),
        "resumed_from": resumption.checkpoint.step if resumption and resumption.checkpoint else None,
        **progress.losses(),
        # Of the checkpoint that is there: the save of a better one may have failed.
        **({"best_val_loss": best.val_loss, "best_step": best.step} if best else {}),
        "best_checkpoint": str(best.path) if best else None,
        "tokens": progress.tokens,
        "tokens_per_second": round(throughput.overall, 1),
        "mfu": throughput.mfu(throughput.overall),
        "seconds": round(seconds, 2),
        "parameters": parameter_count(parts.module),
        "trainable_parameters": trainable_count(parts.module),
        "base_sha256": parts.recorded["base_sha256"],
        "tokenizer_sha256": parts.recorded["tokenizer_sha256"],
        "world_size": world.world_size,
        "strategy": config.distributed.strategy,
        "generation": generation,
        "tracking_uri": redact(tracking_location(config)[0]) if config.tracking.mlflow.enabled else None,
        "device": str(world.device),
        "threads": config.run.threads,
        "precision": as_computed(config, world.device).trainer.precision,
        "peak_memory_bytes": max(world.control.gather(peak_memory_bytes(world.device))),
        # Of a sharded model every rank has to give its part; of any other, rank 0 has it all.
        "state_sha256": state_sha256(*groups) if trainer.stepper.wrapped.is_sharded or world.is_first else "",
        "sample": sample,
    }


def finish(run: RunDirectory, lock: NullLock, result: TrainResult, outputs: Outputs) -> None:
    lock.check()
    best = CheckpointStore(run.checkpoints).pointed("best")
    if best:
        with suppress(OSError):  # a save whose extras failed is made good
            outputs.publish_best(best)
    write_json(run.finished, result)


def still_ours(lock: NullLock) -> bool:
    try:
        lock.check()
    except Interrupted:  # superseded, or the lock cannot be read
        return False
    return True


def begin(
    stack: ExitStack,
    run: RunDirectory,
    resumption: Resumption | None,
    world: World,
    lock: NullLock,
    config: Config,
    to_step: int | None,
) -> int:
    """Number this start of the run. From here on a process that ends without a word has crashed, and that is counted;
    a start that is told to stop, or refused for a mistake, has not."""
    from_step = resumption.checkpoint.step if resumption and resumption.checkpoint else 0
    is_again = is_unattended() or is_restart()
    threads = config.run.threads
    number = world.control.on_rank0(
        lambda: begin_generation(run, from_step, world.world_size, is_again, to_step, threads)
    )

    def end(kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, LlmtrainError) and error.exit_code == UsageError.exit_code:
            status = "refused"
        elif isinstance(error, PeerLost):
            status = "failed"
        elif isinstance(error, Interrupted) or (kind and not issubclass(kind, Exception)):
            status = "stopped"
        else:
            status = "failed" if error else "finished"
        if still_ours(lock):
            with suppress(OSError):
                end_generation(run, number, status, from_step)

    if world.is_first:
        stack.push(end)
    return number


def describe_start(
    config: Config, run: RunDirectory, parts: Components, world: World, generation: int, from_step: int
) -> None:
    clear_heartbeats(run.heartbeats, generation)
    note_generation(run, generation, restored=True)
    describe_run(config, run, parts, world, from_step)


def leave_together(world: World) -> None:
    """A launcher ends the others as soon as one process has ended: rank 0 may still be telling a tracker."""
    with suppress(Exception):
        world.control.barrier()


def sampling_stop(world: World, stop: StopFlag, watchdog: Watchdog) -> Callable[[], bool]:
    """Ends the sample on all ranks at once, when any was told to stop or the time is up."""
    deadline = time.monotonic() + SAMPLE_SEC

    def is_over() -> bool:
        watchdog.tick()
        return world.control.any(stop.requested or time.monotonic() > deadline)

    return is_over


def dry_run(config: Config) -> dict[str, Any]:
    """One forward pass, nothing written but the token cache: does it fit, and how large is it?"""
    setup_logging(config.logging)
    world = World(device=pick_device(config.run.device))
    micro_batches_in_step(config, process_info_here(config.distributed).world_size)
    config, _ = resolve_threads(config, None, world)
    set_up_torch(config)
    parts = build_components(config, world)
    batch = parts.train_batches[0].to(world.device)
    with autocast_for(config, world)():  # with gradients on: the activations a real step keeps count too
        total = parts.adapter.loss(parts.module, batch.inputs, batch.targets, batch.positions)
        loss = total.item() / max(1, batch.target_count)
    config = resolve_steps(config, parts.train_batches)
    parameters, trained = parameter_count(parts.module), trainable_count(parts.module)
    weights_bytes = sum(p.numel() * p.element_size() for p in parts.module.parameters())
    return {
        "dry_run": True,
        "model": config.model.name,
        "device": str(world.device),
        "parameters": parameters,
        "trainable_parameters": trained,
        "vocab_size": parts.adapter.vocab_size,
        "train_tokens": len(parts.prepared.train),
        "val_tokens": len(parts.prepared.val),
        "eval_batches": len(parts.eval_batches),
        "tokens_per_step": round(parts.train_batches.tokens_in_step),
        "steps": config.trainer.steps,
        "epochs": round(config.trainer.steps / parts.train_batches.steps_in(1), 3),
        "loss": loss,
        # weights, and for those that are trained a gradient and AdamW's two averages (Adafactor keeps next to nothing)
        "state_bytes": weights_bytes + (12 if config.trainer.optimizer == "adamw" else 4) * trained,
        "peak_memory_bytes": peak_memory_bytes(world.device),
    }


def describe_run(config: Config, run: RunDirectory, parts: Components, world: World, from_step: int) -> None:
    """Write down what the run is; a resumed run keeps the metadata of its first start, and from a checkpoint on its
    tokenizer."""
    if config.output.save_config_copy:
        settled = config.with_values("output", run_id=run.run_id)
        write_atomic(run.config, dump_document(redact_values(settled.as_dict())))
    if config.output.save_meta_json and not run.meta.exists():
        write_json(run.meta, collect_metadata(run.run_id, config.run.name, str(world.device)))
    if from_step == 0 or saved_sha256(run.tokenizer) != parts.recorded["tokenizer_sha256"]:
        replace_saved_tokenizer(parts.prepared.tokenizer, run.tokenizer)
    for path in parts.adapter.config_files():  # the base model may be gone when the run is used
        run.model_config.mkdir(exist_ok=True)
        write_atomic(run.model_config / path.name, path.read_text(encoding="utf-8"))


def write_sample(outputs: Outputs, told_to_stop: Callable[[], bool]) -> str:
    """A look at what the model learned, within a few seconds. All ranks do it in step: a sharded model needs all."""
    config = outputs.config
    prompts = config.trainer.eval_prompts
    if isinstance(outputs.prepared.train, ExampleStore) and not prompts:
        return ""
    try:
        return sample_text(
            outputs.adapter,
            outputs.module,
            outputs.prepared.tokenizer,
            outputs.written(prompts[0]) if prompts else "",
            SAMPLE_TOKENS,
            config.model.block_size,
            temperature=0.8,
            top_k=50,
            seed=config.run.seed,
            stop=told_to_stop,
            prefix=outputs.prefix(),
            agree=outputs.agree,
        )
    except DataError:  # a char tokenizer of a text without line breaks
        return ""
