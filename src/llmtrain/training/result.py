"""The result of a run: what `train --json` prints and finished.json keeps."""

from contextlib import suppress
from typing import Any, TypeGuard

from llmtrain import registry
from llmtrain.checkpoint.artifacts import Artifacts
from llmtrain.checkpoint.state import model_tensors, optimizer_tensors, state_sha256
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.schema import Config, differences, may_change
from llmtrain.config.trainer import TrainerSection
from llmtrain.config.upgrade import upgraded_values
from llmtrain.distributed.process_info import ProcessInfo
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.files import is_there, read_json, write_json
from llmtrain.logs import log, set_rank, warn
from llmtrain.models.base import parameter_count, trainable_count
from llmtrain.models.device_precision import with_device_precision
from llmtrain.redact import redact, redact_values
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.summary import config_values
from llmtrain.runs.sync import sync_finished
from llmtrain.tracking.mlflow import is_complete, tracking_location
from llmtrain.tracking.replay import replay_run
from llmtrain.training.context import RunContext
from llmtrain.training.loop import Trainer
from llmtrain.training.ownership import is_unattended
from llmtrain.training.resume import Resumption, find_resumed_run
from llmtrain.training.throughput import peak_memory_bytes

TrainResult = dict[str, Any]
_FIELD_TYPES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (str, ("run_id", "run_dir", "state_sha256", "sample")),
    (int, ("steps", "best_step")),
    ((int, float), ("first_train_loss", "final_train_loss", "final_val_loss", "best_val_loss", "tokens_per_second")),
)


def build_result(context: RunContext, trainer: Trainer, seconds: float) -> TrainResult:
    """Every rank must call this: a sharded model is gathered tensor by tensor."""
    config, world, run = context.config, context.world, context.run
    progress, throughput, model = trainer.progress, trainer.throughput, trainer.stepper.model
    recorded = trainer.components.recorded
    prompt, sample = trainer.sample()
    best = CheckpointStore(run.checkpoints).best()
    if best and best.step != progress.best_step and world.is_first:
        warn(
            "SAVE",
            f"the best evaluation was at step {progress.best_step} ({progress.best_val_loss:.4f}), but its checkpoint "
            f"does not exist; the best existing checkpoint is {best.path.name} ({best.val_loss:.4f})",
        )
    groups = model_tensors(model.module), optimizer_tensors(model.module, trainer.stepper.optimizer)
    return {
        "run_id": run.run_id,
        "run_dir": str(run.shown()),
        "status": "finished",
        "steps": progress.step,
        "epochs": progress.epoch,
        "stopped_early": trainer.stopped_early,
        "wanted": requested_length(context.requested_config.trainer),
        "resumed_from": context.resumed_step,
        **progress.losses(),
        # Of an existing checkpoint: the save of a better one may have failed.
        **({"best_val_loss": best.val_loss, "best_step": best.step} if best else {}),
        "best_checkpoint": str(run.shown(best.path)) if best else None,
        "tokens": progress.tokens,
        "tokens_per_second": round(throughput.overall, 1),
        "mfu": throughput.mfu(throughput.overall),
        "seconds": round(seconds, 2),
        "parameters": parameter_count(model.module),
        "trainable_parameters": trainable_count(model.module),
        "base_sha256": recorded["base_sha256"],
        "tokenizer_sha256": recorded["tokenizer_sha256"],
        "world_size": world.world_size,
        "strategy": config.distributed.strategy,
        "generation": context.generation,
        "tracking_uri": redact(tracking_location(config)[0]) if config.tracking.mlflow.enabled else None,
        "device": str(world.device),
        "threads": config.run.threads,
        "precision": with_device_precision(config, world.device).trainer.precision,
        "peak_memory_bytes": max(world.control.gather(peak_memory_bytes(world.device))),
        # Of a sharded model every rank must contribute its part; otherwise rank 0 has all of it.
        "state_sha256": state_sha256(*groups) if model.parallel.is_sharded or world.is_first else "",
        "sample": sample,
        "sample_prompt": prompt,
    }


def publish_result(context: RunContext, result: TrainResult, artifacts: Artifacts) -> TrainResult:
    """Write the result to finished.json and return it: from here on the run is finished."""
    context.lock.check()
    best = CheckpointStore(context.run.checkpoints).pointed("best")
    if best:
        with suppress(OSError):  # retry what an earlier save failed to publish
            artifacts.publish_best(best)
    write_json(context.run.finished, result)
    return result


def find_finished_run(
    config: Config, resume: str | None, process: ProcessInfo
) -> tuple[RunDirectory, TrainResult] | None:
    """A finished run that was restarted unattended. It needs no other process: those that have exited with 0 are not
    restarted, so waiting for them would never end."""
    if not is_unattended() or not config.output.run_id or resume != "auto":
        return None
    run = find_resumed_run(config, resume)
    if run is None:
        return None
    set_rank(process.rank, process.world_size)
    result = finished_result(config, Resumption(run, None, False))
    set_rank(0, 1)
    return (run, result) if result is not None else None


def finished_result(config: Config, resumption: Resumption, allow_change: bool = False) -> TrainResult | None:
    """The result of a finished run; None if it is not finished, or if max_steps or max_epochs was raised since."""
    if resumption.is_explicit:
        return None
    path = resumption.run.finished
    result = read_json(path)
    if not _is_result(result):
        if is_there(path):
            warn("TRAIN", f"{path} is damaged: the newest checkpoint decides whether the run is finished")
        return None
    trainer = config.trainer
    has_all_steps = trainer.max_epochs is None and result["steps"] >= trainer.steps
    if has_all_steps or result.get("wanted") == requested_length(trainer):
        if not allow_change:
            _check_same_config(resumption.run, config)
        log("DONE", f"run {resumption.run.run_id} is finished already, at step {result['steps']}")
        return result
    return None


def complete_finished(config: Config, run: RunDirectory, result: TrainResult) -> TrainResult:
    """Finish reporting on rank 0. A previous process may have been killed after finished.json was written, while it
    was still writing the report, sending metrics to MLflow or copying the run."""
    if config.output.report and not run.report.exists():
        write_report(run)
    if config.tracking.mlflow.enabled and not is_complete(run):
        try:
            replay_run(run, tracking_location(config)[0])
        except LlmtrainError as problem:
            warn("TRAIN", f"MLflow may lack metrics of run {run.run_id}: {problem.what}")
    if config.output.sync_uri:
        sync_finished(run, config.output.sync_uri)
    return result


def write_report(run: RunDirectory) -> None:
    """Write report.html. The run is finished already, so that a failure is only a warning."""
    try:
        registry.resolve("report", "html", registry.REPORTS)(run)
    except Exception as problem:  # a full disk, or a file of the run that was damaged meanwhile
        warn("TRAIN", f"{run.shown(run.report)} could not be written; the run is finished: {problem}")


def requested_length(trainer: TrainerSection) -> dict[str, Any]:
    """How long the run was requested to train: kept with the result, to recognize a longer request."""
    return {
        "max_steps": trainer.max_steps,
        "max_epochs": trainer.max_epochs,
        "early_stopping": trainer.early_stopping_patience,
    }


def _is_result(value: Any) -> TypeGuard[TrainResult]:
    """Whether it has the fields that `train` prints."""
    return isinstance(value, dict) and all(
        isinstance(value.get(name), kind) and not isinstance(value[name], bool)
        for kind, names in _FIELD_TYPES
        for name in names
    )


def _check_same_config(run: RunDirectory, config: Config) -> None:
    """Refuse a run id that belongs to a finished run with another config."""
    recorded = config_values(run)
    changes = differences(upgraded_values(recorded), redact_values(config.as_dict())) if recorded else []
    refused = [change for change in changes if not may_change(change[0])]
    if refused:
        fields = ", ".join(f"{path}: {old!r} -> {new!r}" for path, old, new in refused[:5])
        raise UsageError(
            f"Run '{run.run_id}' is already finished, with another config ({fields}{', ...' if refused[5:] else ''}).",
            remedy="Choose another name for the new run (output.run_id; launch --name).",
        )
