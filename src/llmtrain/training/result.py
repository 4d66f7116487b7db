"""The result of a run: what `train --json` prints and finished.json keeps."""

from contextlib import suppress
from typing import Any

from llmtrain import registry
from llmtrain.checkpoint.artifacts import Artifacts
from llmtrain.checkpoint.state import model_tensors, optimizer_tensors, state_sha256
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.compat.upgrade import upgraded_values
from llmtrain.config.output import OutputSection
from llmtrain.config.schema import Config, differences, may_change
from llmtrain.config.tracking import MlflowSection
from llmtrain.config.trainer import TrainerSection
from llmtrain.core.files import is_there
from llmtrain.core.logs import set_rank, warn
from llmtrain.core.redact import redact, redact_values
from llmtrain.distributed.process_info import ProcessInfo
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.models.base import parameter_count, trainable_count
from llmtrain.models.device_precision import compute_precision
from llmtrain.plan.cost import cost_of_run
from llmtrain.plan.prediction import recorded_prediction
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.progress_lines import log_finished_before
from llmtrain.runs.result import TrainResult
from llmtrain.runs.state import EndStatus
from llmtrain.runs.sync import sync_finished
from llmtrain.runs.view import RunView
from llmtrain.tracking.mlflow import is_complete, tracking_location
from llmtrain.tracking.replay import replay_run
from llmtrain.training.context import RunContext
from llmtrain.training.loop import Trainer
from llmtrain.training.ownership import is_unattended
from llmtrain.training.resume import Resumption, find_resumed_run
from llmtrain.training.throughput import device_name, peak_memory_bytes


def build_result(context: RunContext, trainer: Trainer, seconds: float) -> TrainResult:
    """Every rank must call this: a sharded model is gathered tensor by tensor."""
    config = context.config
    world = context.world
    run = context.run
    state = trainer.state
    throughput = trainer.throughput
    model = trainer.stepper.model
    recorded = trainer.components.recorded
    prompt, sample = trainer.sample()
    losses = state.losses()
    best = CheckpointStore(run.checkpoints).best()
    if best:
        # Of an existing checkpoint: the save of a better one may have failed.
        losses |= {"best_val_loss": best.val_loss, "best_step": best.step}
        if best.step != state.best_step and world.is_first:
            warn(
                "SAVE",
                f"the best evaluation was at step {state.best_step} ({state.best_val_loss:.4f}), but its checkpoint "
                f"does not exist; the best existing checkpoint is {best.path.name} ({best.val_loss:.4f})",
            )
    tracking_uri = None
    if config.tracking.mlflow.enabled:
        tracking_uri = redact(tracking_location(config.tracking.mlflow, config.output.root_dir)[0])
    weights = model_tensors(model.module)
    optimizer_state = optimizer_tensors(model.module, trainer.stepper.optimizer)
    sha256 = ""
    if model.parallel.is_sharded or world.is_first:
        # Of a sharded model every rank must contribute its part; otherwise rank 0 has all of it.
        sha256 = state_sha256(weights, optimizer_state)
    values = {
        "run_id": run.run_id,
        "run_dir": str(run.shown()),
        "status": EndStatus.FINISHED.value,
        "steps": state.step,
        "epochs": state.epoch,
        "stopped_early": trainer.stopped_early,
        "wanted": requested_length(context.requested_config.trainer),
        "resumed_from": context.resumed_step,
        **losses,
        "best_checkpoint": str(run.shown(best.path)) if best else None,
        "tokens": state.tokens,
        "tokens_per_second": round(throughput.overall, 1),
        "mfu": throughput.mfu(throughput.overall),
        "seconds": round(seconds, 2),
        "timing": trainer.timing.as_dict(),
        "parameters": parameter_count(model.module),
        "trainable_parameters": trainable_count(model.module),
        "base_sha256": recorded["base_sha256"],
        "tokenizer_sha256": recorded["tokenizer_sha256"],
        "world_size": world.world_size,
        "strategy": config.distributed.strategy,
        "generation": context.generation,
        "tracking_uri": tracking_uri,
        "gpu_hours": None,
        "cost": None,
        "predicted": None,
        "device_name": device_name(world.device),
        "device": str(world.device),
        "threads": config.run.threads,
        "precision": compute_precision(config.trainer, world.device),
        "peak_memory_bytes": max(world.control.gather(peak_memory_bytes(world.device))),
        "state_sha256": sha256,
        "sample": sample,
        "sample_prompt": prompt,
    }
    return TrainResult.of(values)


def publish_result(context: RunContext, result: TrainResult, artifacts: Artifacts) -> TrainResult:
    """Write the result to finished.json and return it: from here on the run is finished."""
    context.lock.check()
    view = RunView(context.run)
    cost = cost_of_run(view, context.config.plan.prices)
    spent = {"gpu_hours": view.gpu_hours, "cost": cost and {"amount": cost.cost, "currency": cost.currency}}
    predicted = recorded_prediction(view)
    spent["predicted"] = predicted.as_dict() if predicted else None
    result = TrainResult.of({**result.values, **spent})
    best = CheckpointStore(context.run.checkpoints).pointed("best")
    if best:
        with suppress(OSError):  # retry what an earlier save failed to publish
            artifacts.publish_best(best)
    result.write(context.run.finished)
    return result


def find_finished_run(config: Config, resume: str | None, process: ProcessInfo) -> TrainResult | None:
    """The result of a finished run that was restarted unattended. It needs no other process: those that have exited
    with 0 are not restarted, so waiting for them would never end."""
    if not is_unattended() or not config.output.run_id or resume != "auto":
        return None
    run = find_resumed_run(config.output, config.run.name, resume)
    if run is None:
        return None
    set_rank(process.rank, process.world_size)
    result = finished_result(config, Resumption(run, None, False))
    set_rank(0, 1)
    if result is not None and process.rank == 0:
        complete_finished(config.output, config.tracking.mlflow, run)
    return result


def finished_result(config: Config, resumption: Resumption, allow_change: bool = False) -> TrainResult | None:
    """The result of a finished run; None if it is not finished, or if max_steps or max_epochs was raised since."""
    if resumption.is_explicit:
        return None
    path = resumption.run.finished
    result = TrainResult.read(path)
    if result is None:
        if is_there(path):
            warn("TRAIN", f"{path} is damaged: the newest checkpoint decides whether the run is finished")
        return None
    trainer = config.trainer
    has_all_steps = trainer.max_epochs is None and result.steps >= trainer.steps
    if has_all_steps or result.values.get("wanted") == requested_length(trainer):
        if not allow_change:
            _check_same_config(resumption.run, redact_values(config.as_dict()))
        log_finished_before(resumption.run.run_id, result.steps)
        return result
    return None


def complete_finished(output: OutputSection, mlflow: MlflowSection, run: RunDirectory) -> None:
    """Finish reporting on rank 0. A previous process may have been killed after finished.json was written, while it
    was still writing the report, sending metrics to MLflow or copying the run."""
    if output.report and not run.report.exists():
        write_report(run)
    if mlflow.enabled and not is_complete(run):
        try:
            replay_run(run, tracking_location(mlflow, output.root_dir)[0])
        except LlmtrainError as problem:
            warn("TRAIN", f"MLflow may lack metrics of run {run.run_id}: {problem.what}")
    if output.sync_uri:
        sync_finished(run, output.sync_uri)


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


def _check_same_config(run: RunDirectory, values: dict[str, Any]) -> None:
    """Refuse a run id that belongs to a finished run with another config."""
    recorded = RunView(run).config
    changes = differences(upgraded_values(recorded), values) if recorded else []
    refused = [change for change in changes if not may_change(change[0])]
    if refused:
        fields = ", ".join(f"{path}: {old!r} -> {new!r}" for path, old, new in refused[:5])
        if refused[5:]:
            fields += ", ..."
        raise UsageError(
            f"Run '{run.run_id}' is already finished, with another config ({fields}).",
            remedy="Choose another name for the new run (output.run_id; launch --name).",
        )
