"""Going on with a run: which one, from which checkpoint, and whether it is still the same run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn

from llmtrain.checkpoint.state import TrainState, load_tensors
from llmtrain.checkpoint.store import Checkpoint, CheckpointStore, find_checkpoint
from llmtrain.config.run import MAX_THREADS
from llmtrain.config.schema import Config, differences, may_change
from llmtrain.config.trainer import TrainerSection
from llmtrain.config.upgrade import upgraded_values
from llmtrain.data.tokenizers.tokenizer import saved_sha256
from llmtrain.distributed.world import World
from llmtrain.errors import CheckpointError, UsageError
from llmtrain.files import is_there, read_json
from llmtrain.logs import log, warn
from llmtrain.redact import redact, redact_values
from llmtrain.runs.directory import RunDirectory, find_run, list_runs
from llmtrain.runs.generations import has_saved
from llmtrain.runs.metrics import read_metrics
from llmtrain.runs.summary import config_values, read_meta

TrainResult = dict[str, Any]
_OF_RESULT: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (str, ("run_id", "run_dir", "state_sha256", "sample")),
    (int, ("steps", "best_step")),
    ((int, float), ("first_train_loss", "final_train_loss", "final_val_loss", "best_val_loss", "tokens_per_second")),
)
_RECORDED = ("data_fingerprint", "tokenizer_sha256", "vocab_size", "micro_batches", "base_sha256")


@dataclass(frozen=True)
class Resumption:
    """Where a run goes on: its directory, and the checkpoint (None: from the beginning)."""

    run: RunDirectory
    checkpoint: Checkpoint | None
    is_explicit: bool
    """Whether the checkpoint was named, rather than the newest one taken."""


def find_resumed_run(config: Config, resume: str) -> RunDirectory | None:
    """The run that --resume means: by id, by the path of the run or of a checkpoint, or `auto` (None: a new one)."""
    if resume == "auto":
        return _newest_run(config)
    run = _named_run(config, resume)
    if config.output.run_id not in (None, run.run_id):
        raise UsageError(
            f"--resume {resume} is run '{run.run_id}', but output.run_id is '{config.output.run_id}'.",
            remedy="A run goes on in its own directory: leave output.run_id out.",
        )
    return run


def _named_run(config: Config, resume: str) -> RunDirectory:
    if _is_checkpoint_path(resume):
        return find_run(
            config.output.root_dir, str(find_checkpoint(Path(resume).expanduser()).path.absolute().parents[1])
        )
    return find_run(config.output.root_dir, resume)


def find_resumption(run: RunDirectory, resume: str) -> Resumption:
    """The checkpoint to go on from: the one that was named, else the newest that is whole."""
    store = CheckpointStore(run.checkpoints)
    store.clean()
    if _is_checkpoint_path(resume):
        checkpoint = find_checkpoint(Path(resume).expanduser())
        checkpoint.verify()
        return Resumption(run, checkpoint, True)
    newest = store.newest_usable()
    if newest is None:
        _check_never_saved(run)
        log("TRAIN", f"run {run.run_id} has no checkpoint yet: it starts from the beginning")
    return Resumption(run, newest, False)


def _check_never_saved(run: RunDirectory) -> None:
    """Refuse to start a run over whose checkpoints are gone: that would erase its metrics, too."""
    folder = run.checkpoints
    if is_there(folder) and not folder.is_dir():
        why = f"{folder} is {'a link that leads nowhere' if folder.is_symlink() else 'not a directory'}."
    else:
        has = True if is_there(run.finished) else has_saved(run)
        if has is None and not folder.is_dir():  # generations.json is damaged, or of an earlier version
            has = next(read_metrics(run.metrics), None) is not None
        if not has:
            return
        where = "is empty" if folder.is_dir() else "is missing"
        why = f"Run '{run.run_id}' has saved checkpoints, but {folder} {where}."
    raise CheckpointError(
        why,
        remedy="Mount its disk or restore it from a backup, then resume again. To train from the beginning, start a "
        "new run.",
    )


def recorded_threads(resumption: Resumption | None) -> int | None:
    """The number of threads that the run has used so far: sums depend on it."""
    if not resumption:
        return None
    checkpoint = resumption.checkpoint
    values = checkpoint.state().get("config", {}) if checkpoint else config_values(resumption.run)
    section = values.get("run")
    threads = section.get("threads") if isinstance(section, dict) else None
    is_usable = isinstance(threads, int) and not isinstance(threads, bool) and 0 < threads <= MAX_THREADS
    return threads if is_usable else None


def _is_checkpoint_path(resume: str) -> bool:
    path = Path(resume).expanduser()
    return path.parent.name == "checkpoints" or path.suffix == ".pt"


def _newest_run(config: Config) -> RunDirectory | None:
    """The run that output.run_id names; without one, the newest unfinished run of this name."""
    root = config.output.root_dir
    if config.output.run_id:
        run = RunDirectory(Path(root).expanduser() / config.output.run_id)
        return run if run.exists() else None
    for run in reversed(list_runs(root)):
        if _name(run) == redact(config.run.name) and not run.finished.exists():
            return run
    return None


def _name(run: RunDirectory) -> Any:
    """Its run.name, from the first record that has it: meta.json and config.yaml may be damaged or turned off."""
    name = read_meta(run).get("name")
    if isinstance(name, str):
        return name
    section = config_values(run).get("run")
    if not isinstance(section, dict):
        newest = CheckpointStore(run.checkpoints).pointed("latest")
        try:
            section = newest.state()["config"].get("run") if newest else None
        except CheckpointError:
            section = None
    return section.get("name") if isinstance(section, dict) else None


def already_finished(config: Config, resumption: Resumption, allow_change: bool = False) -> TrainResult | None:
    """The result of a run that is complete; a raised max_steps or max_epochs makes it go on instead."""
    if resumption.is_explicit:
        return None
    result = read_json(resumption.run.finished)
    if not _is_result(result):
        if is_there(resumption.run.finished):
            path = resumption.run.finished
            warn("TRAIN", f"{path} is damaged: whether the run is finished is judged by its newest checkpoint")
        return None
    trainer = config.trainer
    has_all_steps = trainer.max_epochs is None and result["steps"] >= trainer.steps
    if has_all_steps or result.get("wanted") == wanted(trainer):
        if not allow_change:
            _check_finished_by(resumption.run, config)
        log("DONE", f"run {resumption.run.run_id} is finished already, at step {result['steps']}")
        return result
    return None


def _is_result(value: Any) -> TypeGuard[TrainResult]:
    """Whether it has what `train` prints of a finished run."""
    return isinstance(value, dict) and all(
        isinstance(value.get(name), kind) and not isinstance(value[name], bool)
        for kind, names in _OF_RESULT
        for name in names
    )


def _check_finished_by(run: RunDirectory, config: Config) -> None:
    """A run of this name that was made by another config is not the one that is asked for."""
    then = config_values(run)
    found = differences(upgraded_values(then), redact_values(config.as_dict())) if then else []
    changed = [row for row in found if not may_change(row[0])]
    if changed:
        fields = ", ".join(f"{path}: {old!r} -> {new!r}" for path, old, new in changed[:5])
        raise UsageError(
            f"Run '{run.run_id}' is finished already, by another config ({fields}{', ...' if changed[5:] else ''}).",
            remedy="Give the new run another name (output.run_id; launch --name).",
        )


def wanted(trainer: TrainerSection) -> dict[str, Any]:
    """How far the run is to go: kept with the result, to tell whether that is still what is asked for."""
    return {
        "max_steps": trainer.max_steps,
        "max_epochs": trainer.max_epochs,
        "early_stopping": trainer.early_stopping_patience,
    }


def check_config(resumption: Resumption, config: Config, allow_change: bool) -> None:
    """Refuse to go on with another model, seed or schedule than the run began with."""
    checkpoint = resumption.checkpoint
    if checkpoint is None:
        return
    found = differences(upgraded_values(checkpoint.state()["config"]), redact_values(config.as_dict()))
    refuse_changes(checkpoint, [row for row in found if not may_change(row[0])], allow_change)
    trainer = config.trainer
    if trainer.max_epochs is None:
        check_not_past(resumption, config)
    changed = [path for path, _, _ in found if path in ("trainer.max_steps", "trainer.max_epochs")]
    if changed and trainer.schedule != "constant" and trainer.schedule_steps is None:
        warn("TRAIN", f"{changed[0]} has changed, and with it the learning rate: it falls until the new end of the run")


def check_not_past(resumption: Resumption, config: Config) -> None:
    """Refuse a checkpoint that is further than the run is to go."""
    checkpoint, trainer = resumption.checkpoint, config.trainer
    if checkpoint is not None and checkpoint.step > trainer.steps:
        end = "trainer.max_steps" if trainer.max_epochs is None else "trainer.max_epochs"
        raise UsageError(
            f"{checkpoint.path} is past the last step, {trainer.steps}, of {end}.",
            remedy=f"Raise {end}, or resume from an earlier checkpoint.",
        )


def check_recorded(resumption: Resumption, now: dict[str, Any], allow_change: bool) -> None:
    """Refuse to go on with other data or another tokenizer; paths may differ, what they hold may not."""
    checkpoint = resumption.checkpoint
    if checkpoint is None:
        return
    then = checkpoint.state()
    if "tokenizer_sha256" not in then:  # a checkpoint of an earlier version: the run has its tokenizer
        then = {**then, "tokenizer_sha256": saved_sha256(resumption.run.tokenizer) or now["tokenizer_sha256"]}
    names = [name for name in _RECORDED if then.get(name) != now[name]]
    changed = [(name, then.get(name), now[name]) for name in names]
    if changed:
        paths = ("data.files", "data.val_files", "data.train_file", "data.val_file", "data.tokenizer", "model.path")
        changed += [row for row in differences(upgraded_values(then["config"]), now["config"]) if row[0] in paths]
    refuse_changes(checkpoint, changed, allow_change)
    if then.get("device") not in (None, now["device"]):
        warn("TRAIN", f"the run goes from {then['device']} to {now['device']}: not bit-exact across the two")
    if then.get("architecture") not in (None, now["architecture"]):
        warn(
            "TRAIN",
            f"this run was trained on {then['architecture']} and continues on {now['architecture']}: from here on it "
            "is not bit-exact with an uninterrupted run (docs/guarantees.md)",
        )


def refuse_changes(checkpoint: Checkpoint, rows: list[tuple[str, Any, Any]], allow_change: bool) -> None:
    changed = [f"{path}: {old!r} -> {new!r}" for path, old, new in rows]
    if not changed:
        return
    if allow_change:
        warn("TRAIN", f"going on with a changed config: {'; '.join(changed)}")
        return
    raise UsageError(
        f"{checkpoint.path} belongs to a run with another config or other data:\n  - " + "\n  - ".join(changed),
        remedy="Undo the changes, start a new run, or give --allow-config-change to go on all the same.",
    )


def restore(
    resumption: Resumption | None,
    store: CheckpointStore,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
) -> TrainState:
    """Put a checkpoint's tensors into the model and the optimizer, and say how far the run was."""
    if not resumption or not resumption.checkpoint:
        return TrainState()
    checkpoint = resumption.checkpoint
    try:
        load_tensors(module, optimizer, checkpoint.read_into)
        progress = checkpoint.progress()
    except (RuntimeError, KeyError, ValueError, TypeError) as problem:
        raise CheckpointError(
            f"{checkpoint.path} holds another model: {' '.join(str(problem).split())[:300]}",
            remedy="Use the config the run was made with.",
        ) from None
    if world.is_first:
        # What is newer is damaged, or belongs to the course the run is leaving.
        store.set_aside_after(progress.step)
        resumption.run.finished.unlink(missing_ok=True)
        store.point(progress.step)
    log("TRAIN", f"resumed from {checkpoint.path}")
    return progress
