"""Resuming a run: which run, from which checkpoint, and whether its config and data are unchanged."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.checkpoint.state import TrainState, load_tensors
from llmtrain.checkpoint.store import CheckpointStore, find_checkpoint
from llmtrain.config.run import MAX_THREADS
from llmtrain.config.schema import Config, differences, may_change
from llmtrain.config.upgrade import upgraded_values
from llmtrain.data.tokenizers.load import saved_sha256
from llmtrain.distributed.world import World
from llmtrain.errors import CheckpointError, UsageError
from llmtrain.files import is_there
from llmtrain.logs import log, warn
from llmtrain.models.numerics import LATEST, Numerics
from llmtrain.redact import redact, redact_values
from llmtrain.runs.directory import RunDirectory, find_run, list_runs
from llmtrain.runs.generations import has_saved
from llmtrain.runs.metrics import read_metrics
from llmtrain.runs.recorded_config import is_checkpoint_path
from llmtrain.runs.summary import config_values, read_meta

Change = tuple[str, Any, Any]
"""(name, recorded value, new value)"""
_RECORDED = ("data_fingerprint", "tokenizer_sha256", "vocab_size", "micro_batches", "base_sha256")


@dataclass(frozen=True)
class Resumption:
    """A run to resume, and the checkpoint to resume it from (None: from the beginning)."""

    run: RunDirectory
    checkpoint: Checkpoint | None
    is_explicit: bool
    """Whether --resume names the checkpoint, rather than the run."""


def find_resumed_run(config: Config, resume: str) -> RunDirectory | None:
    """The run that --resume names: an id, the path of a run or checkpoint, or `auto` (None: start a new run)."""
    if resume == "auto":
        return _newest_run(config)
    run = _named_run(config, resume)
    if config.output.run_id not in (None, run.run_id):
        raise UsageError(
            f"--resume {resume} is run '{run.run_id}', but output.run_id is '{config.output.run_id}'.",
            remedy="A run is resumed in its own directory: leave output.run_id unset.",
        )
    return run


def _named_run(config: Config, resume: str) -> RunDirectory:
    if is_checkpoint_path(resume):
        checkpoint = find_checkpoint(Path(resume).expanduser())
        return find_run(config.output.root_dir, str(checkpoint.path.absolute().parents[1]))
    return find_run(config.output.root_dir, resume)


def find_resumption(run: RunDirectory, resume: str) -> Resumption:
    """The checkpoint that --resume names, else the newest intact one. The caller must own the run's lock."""
    store = CheckpointStore(run.checkpoints)
    store.clean()
    if is_checkpoint_path(resume):
        checkpoint = find_checkpoint(Path(resume).expanduser())
        checkpoint.verify()
        return Resumption(run, checkpoint, True)
    newest = store.newest_usable()
    if newest is None:
        _check_never_saved(run)
        log("TRAIN", f"run {run.run_id} has no checkpoint yet: it starts from the beginning")
    return Resumption(run, newest, False)


def _check_never_saved(run: RunDirectory) -> None:
    """Refuse to restart a run whose checkpoints are lost: that would also erase its metrics."""
    folder = run.checkpoints
    if is_there(folder) and not folder.is_dir():
        what = f"{folder} is {'a dangling symbolic link' if folder.is_symlink() else 'not a directory'}."
    else:
        has_checkpoints = True if is_there(run.finished) else has_saved(run)
        if has_checkpoints is None and not folder.is_dir():  # generations.json is damaged, or of an earlier version
            has_checkpoints = next(read_metrics(run.metrics), None) is not None
        if not has_checkpoints:
            return
        what = f"Run '{run.run_id}' has saved checkpoints, but {folder} is {'empty' if folder.is_dir() else 'missing'}."
    raise CheckpointError(
        what,
        remedy="Mount its disk or restore it from a backup, then resume again. To train from the beginning, start a "
        "new run.",
    )


def _recorded_values(resumption: Resumption) -> dict[str, Any]:
    """The config that the run was started or last resumed with."""
    checkpoint = resumption.checkpoint
    values: dict[str, Any] = checkpoint.state().get("config", {}) if checkpoint else config_values(resumption.run)
    return values


def recorded_threads(resumption: Resumption | None) -> int | None:
    """The number of threads the run has used so far: rounding depends on it."""
    if not resumption:
        return None
    section = _recorded_values(resumption).get("run")
    threads = section.get("threads") if isinstance(section, dict) else None
    is_valid = isinstance(threads, int) and not isinstance(threads, bool) and 0 < threads <= MAX_THREADS
    return threads if is_valid else None


def with_recorded_attention(config: Config, resumption: Resumption | None) -> Config:
    """The config with the attention of the run in the place of `auto`: before `auto` was the default, sdpa was."""
    if not resumption or getattr(config.model, "attention", None) != "auto":
        return config
    section = _recorded_values(resumption).get("model")
    attention = section.get("attention", "sdpa") if isinstance(section, dict) else "auto"
    return config.with_values("model", attention=attention)


def recorded_numerics(resumption: Resumption | None) -> Numerics:
    """The numerics that the run was started with; the latest for a new run."""
    if not resumption:
        return Numerics()
    checkpoint = resumption.checkpoint
    state = checkpoint.state() if checkpoint else read_meta(resumption.run)
    if not checkpoint and "run_id" not in state:
        return Numerics()  # it has not started yet, or has no meta.json: it starts from the beginning
    return numerics_of(state, resumption.run)


def numerics_of(state: dict[str, Any], run: RunDirectory) -> Numerics:
    """Those that a checkpoint or meta.json records. Version 1 is not recorded."""
    version = state.get("numerics", 1)
    if type(version) is not int or not 1 <= version <= LATEST:
        raise CheckpointError(
            f"Run '{run.run_id}' was trained with numerics version {version!r}; this llmtrain has the "
            f"versions 1 to {LATEST}.",
            remedy="Use the version of llmtrain that trained it, or a later one.",
        )
    return Numerics(version)


def _newest_run(config: Config) -> RunDirectory | None:
    """The run with id output.run_id; without one, the newest unfinished run with this run.name."""
    root = config.output.root_dir
    if config.output.run_id:
        run = RunDirectory(Path(root).expanduser() / config.output.run_id)
        return run if run.exists() else None
    for run in reversed(list_runs(root)):
        if _run_name(run) == redact(config.run.name) and not run.finished.exists():
            return run
    return None


def _run_name(run: RunDirectory) -> Any:
    """run.name from the first record that has it: meta.json and config.yaml may be damaged or disabled."""
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


def check_config(resumption: Resumption, config: Config, allow_change: bool) -> None:
    """Refuse to resume with a different model, seed or schedule."""
    checkpoint = resumption.checkpoint
    if checkpoint is None:
        return
    changes = differences(upgraded_values(checkpoint.state()["config"]), redact_values(config.as_dict()))
    _refuse_other_optimizer(resumption.run, changes)
    refuse_changes(checkpoint, [change for change in changes if not may_change(change[0])], allow_change)
    trainer = config.trainer
    if trainer.max_epochs is None:
        check_not_past(resumption, config)
    changed = [path for path, _, _ in changes if path in ("trainer.max_steps", "trainer.max_epochs")]
    if changed and trainer.schedule != "constant" and trainer.schedule_steps is None:
        warn("TRAIN", f"{changed[0]} has changed, so the learning rate now decays until the new end of the run")


def _refuse_other_optimizer(run: RunDirectory, changes: list[Change]) -> None:
    """Also with --allow-config-change: the averages of one optimizer are of no use to another."""
    for path, old, new in changes:
        if path == "trainer.optimizer":
            raise UsageError(
                f"Run '{run.run_id}' was trained with trainer.optimizer {old}, whose state {new} cannot use.",
                remedy=f"Resume it with trainer.optimizer {old}, or start a new run from its weights: llmtrain train "
                f"--from {run.path} --set trainer.optimizer={new}",
            )


def check_not_past(resumption: Resumption, config: Config) -> None:
    """Refuse a checkpoint beyond the last step of the run."""
    checkpoint, trainer = resumption.checkpoint, config.trainer
    if checkpoint is not None and checkpoint.step > trainer.steps:
        end = "trainer.max_steps" if trainer.max_epochs is None else "trainer.max_epochs"
        raise UsageError(
            f"{checkpoint.path} is past the last step, {trainer.steps}, of {end}.",
            remedy=f"Raise {end}, or resume from an earlier checkpoint.",
        )


def check_recorded(resumption: Resumption, now: dict[str, Any], allow_change: bool) -> None:
    """Refuse to resume with different data or another tokenizer. Paths may change, contents may not."""
    checkpoint = resumption.checkpoint
    if checkpoint is None:
        return
    then = checkpoint.state()
    if "tokenizer_sha256" not in then:  # written by an earlier version: the run directory has its tokenizer
        then = {**then, "tokenizer_sha256": saved_sha256(resumption.run.tokenizer) or now["tokenizer_sha256"]}
    names = [name for name in _RECORDED if then.get(name) != now[name]]
    changes: list[Change] = [(name, then.get(name), now[name]) for name in names]
    if changes:
        paths = ("data.files", "data.val_files", "data.train_file", "data.val_file", "data.tokenizer", "model.path")
        changes += [
            change for change in differences(upgraded_values(then["config"]), now["config"]) if change[0] in paths
        ]
    refuse_changes(checkpoint, changes, allow_change)
    warn_of_changed_code(then, now.get("plugins", {}))
    if then.get("device") not in (None, now["device"]):
        warn("TRAIN", f"the run moves from {then['device']} to {now['device']}: results are not bit-exact across them")
    if then.get("architecture") not in (None, now["architecture"]):
        warn(
            "TRAIN",
            f"this run was trained on {then['architecture']} and continues on {now['architecture']}: from here on it "
            "is not bit-exact with an uninterrupted run (docs/guarantees.md)",
        )


def warn_of_changed_code(then: dict[str, Any], now: dict[str, dict[str, Any]]) -> None:
    """Warn if a class of the user's own has other source than when the checkpoint was saved. Not refused: most changes,
    such as a comment or a fixed bug, leave the weights usable, and changed data is refused by its fingerprint."""
    for field, facts in now.items():
        before = (then.get("plugins") or {}).get(field, {}).get("sha256")
        if before not in (None, facts["sha256"]):
            warn(
                "TRAIN",
                f"the code of {field} {facts['name']} has changed since the checkpoint was saved (SHA-256 "
                f"{str(before)[:12]} -> {str(facts['sha256'])[:12]}): results may differ from an uninterrupted run",
            )


def refuse_changes(checkpoint: Checkpoint, changes: list[Change], allow_change: bool) -> None:
    changed = [f"{path}: {old!r} -> {new!r}" for path, old, new in changes]
    if not changed:
        return
    if allow_change:
        warn("TRAIN", f"resuming with a changed config: {'; '.join(changed)}")
        return
    raise UsageError(
        f"{checkpoint.path} belongs to a run with another config or other data:\n  - " + "\n  - ".join(changed),
        remedy="Undo the changes, start a new run, or pass --allow-config-change to resume anyway.",
    )


def restore(
    resumption: Resumption | None,
    store: CheckpointStore,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
) -> TrainState:
    """Load the checkpoint into the model and the optimizer, and return the progress of the run."""
    if not resumption or not resumption.checkpoint:
        return TrainState()
    checkpoint = resumption.checkpoint
    try:
        load_tensors(module, optimizer, checkpoint.read_into)
        progress = checkpoint.progress()
    except (RuntimeError, KeyError, ValueError, TypeError) as problem:
        raise CheckpointError(
            f"{checkpoint.path} contains another model: {' '.join(str(problem).split())[:300]}",
            remedy="Use the config the run was started with.",
        ) from None
    if world.is_first:
        # Newer checkpoints are damaged, or this resume goes back before them.
        store.set_aside_after(progress.step)
        resumption.run.finished.unlink(missing_ok=True)
        store.point(progress.step)
    log("TRAIN", f"resumed from {checkpoint.path}")
    return progress
