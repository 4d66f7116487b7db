"""Resuming a run: which run, from which checkpoint, and whether its config and data are unchanged."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.checkpoint.state import TrainState, load_tensors
from llmtrain.checkpoint.store import CheckpointStore, find_checkpoint
from llmtrain.compat.numerics import Numerics, recorded_attention
from llmtrain.compat.run_files import lacks_tokenizer_hash
from llmtrain.compat.upgrade import upgraded_values
from llmtrain.config.output import OutputSection
from llmtrain.config.run import MAX_THREADS
from llmtrain.config.schema import Config, differences, may_change
from llmtrain.config.trainer import TrainerSection
from llmtrain.core.files import is_there
from llmtrain.core.logs import log, warn
from llmtrain.core.redact import redact, redact_values
from llmtrain.core.text import plural
from llmtrain.data.tokenizers.load import saved_sha256
from llmtrain.distributed.batch_split import micro_batches_in_step
from llmtrain.distributed.world import World
from llmtrain.errors import CheckpointError, UsageError
from llmtrain.runs.directory import RunDirectory, find_run, list_runs
from llmtrain.runs.generations import has_saved
from llmtrain.runs.progress_lines import log_resumed
from llmtrain.runs.recorded_config import is_checkpoint_path
from llmtrain.runs.view import RunView

Change = tuple[str, Any, Any]
"""(name, recorded value, new value)"""
_RECORDED = ("data_fingerprint", "tokenizer_sha256", "vocab_size", "micro_batches", "base_sha256")
_BATCH_FIELDS = ("trainer.grad_accum_steps", "trainer.scale_batch")
"""With the number of processes they give the number of micro-batches per step; only that must stay the same."""


@dataclass(frozen=True)
class Resumption:
    """A run to resume, and the checkpoint to resume it from (None: from the beginning)."""

    run: RunDirectory
    checkpoint: Checkpoint | None
    is_explicit: bool
    """Whether --resume names the checkpoint, rather than the run."""


def find_resumed_run(output: OutputSection, run_name: str, resume: str) -> RunDirectory | None:
    """The run that --resume names: an id, the path of a run or checkpoint, or `auto` (None: start a new run)."""
    if resume == "auto":
        return _newest_run(output, run_name)
    name = resume
    if is_checkpoint_path(resume):
        checkpoint = find_checkpoint(Path(resume).expanduser())
        name = str(checkpoint.path.absolute().parents[1])
    run = find_run(output.root_dir, name)
    if output.run_id not in (None, run.run_id):
        raise UsageError(
            f"--resume {resume} is run '{run.run_id}', but output.run_id is '{output.run_id}'.",
            remedy="A run is resumed in its own directory: leave output.run_id unset.",
        )
    return run


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
        kind = "a dangling symbolic link" if folder.is_symlink() else "not a directory"
        what = f"{folder} is {kind}."
    else:
        has_checkpoints = True if is_there(run.finished) else has_saved(run)
        if has_checkpoints is None and not folder.is_dir():  # generations.json is damaged, or of an earlier version
            has_checkpoints = next(RunView(run).read_rows(), None) is not None
        if not has_checkpoints:
            return
        problem = "empty" if folder.is_dir() else "missing"
        what = f"Run '{run.run_id}' has saved checkpoints, but {folder} is {problem}."
    raise CheckpointError(
        what,
        remedy="Mount its disk or restore it from a backup, then resume again. To train from the beginning, start a "
        "new run.",
    )


def _recorded_values(resumption: Resumption) -> dict[str, Any]:
    """The config that the run was started or last resumed with."""
    checkpoint = resumption.checkpoint
    return checkpoint.state().get("config", {}) if checkpoint else RunView(resumption.run).config


def recorded_threads(resumption: Resumption | None) -> int | None:
    """The number of threads the run has used so far: rounding depends on it."""
    if not resumption:
        return None
    section = _recorded_values(resumption).get("run")
    threads = section.get("threads") if isinstance(section, dict) else None
    is_valid = isinstance(threads, int) and not isinstance(threads, bool) and 0 < threads <= MAX_THREADS
    return threads if is_valid else None


def attention_of(resumption: Resumption) -> str:
    """The value that `model.attention: auto` has for a run."""
    section = _recorded_values(resumption).get("model")
    return recorded_attention(section) if isinstance(section, dict) else "auto"


def recorded_numerics(resumption: Resumption | None) -> Numerics:
    """The numerics that the run was started with; the latest for a new run."""
    if not resumption:
        return Numerics()
    checkpoint = resumption.checkpoint
    state = checkpoint.state() if checkpoint else RunView(resumption.run).meta
    if not checkpoint and "run_id" not in state:
        return Numerics()  # it has not started yet, or has no meta.json: it starts from the beginning
    return Numerics.recorded(state, resumption.run.run_id)


def _newest_run(output: OutputSection, run_name: str) -> RunDirectory | None:
    """The run with id output.run_id; without one, the newest unfinished run with this run.name."""
    if output.run_id:
        run = RunDirectory(Path(output.root_dir).expanduser() / output.run_id)
        return run if run.exists() else None
    for run in reversed(list_runs(output.root_dir)):
        if _run_name(run) == redact(run_name) and not run.finished.exists():
            return run
    return None


def _run_name(run: RunDirectory) -> Any:
    """run.name from the first record that has it: meta.json and config.yaml may be damaged or disabled."""
    name = RunView(run).meta.get("name")
    if isinstance(name, str):
        return name
    section = RunView(run).config.get("run")
    if not isinstance(section, dict):
        newest = CheckpointStore(run.checkpoints).pointed("latest")
        try:
            section = newest.state()["config"].get("run") if newest else None
        except CheckpointError:
            section = None
    return section.get("name") if isinstance(section, dict) else None


def check_config(resumption: Resumption, config: Config, world_size: int, allow_change: bool) -> None:
    """Refuse to resume with a different model, seed or schedule."""
    checkpoint = resumption.checkpoint
    if checkpoint is None:
        return
    changes = differences(upgraded_values(checkpoint.state()["config"]), redact_values(config.as_dict()))
    _refuse_other_optimizer(resumption.run, changes)
    refused = [change for change in changes if not may_change(change[0])]
    if checkpoint.state().get("micro_batches") == micro_batches_in_step(config.trainer, config.distributed, world_size):
        refused = [change for change in refused if change[0] not in _BATCH_FIELDS]
    refuse_changes(checkpoint, refused, allow_change)
    trainer = config.trainer
    if trainer.max_epochs is None:
        check_not_past(resumption, trainer)
    changed = [path for path, _, _ in changes if path in ("trainer.max_steps", "trainer.max_epochs")]
    if changed and trainer.schedule != "constant" and trainer.schedule_steps is None:
        warn("TRAIN", f"{changed[0]} has changed, so the learning rate now decays until the new end of the run")


def _refuse_other_optimizer(run: RunDirectory, changes: list[Change]) -> None:
    """Raise if the optimizer changed, even with --allow-config-change: another one cannot use its averages."""
    for path, old, new in changes:
        if path == "trainer.optimizer":
            raise UsageError(
                f"Run '{run.run_id}' was trained with trainer.optimizer {old}, whose state {new} cannot use.",
                remedy=f"Resume it with trainer.optimizer {old}, or start a new run from its weights: llmtrain train "
                f"--from {run.path} --set trainer.optimizer={new}",
            )


def check_not_past(resumption: Resumption, trainer: TrainerSection) -> None:
    """Refuse a checkpoint beyond the last step of the run."""
    checkpoint = resumption.checkpoint
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
    if lacks_tokenizer_hash(then):
        then = {**then, "tokenizer_sha256": saved_sha256(resumption.run.tokenizer) or now["tokenizer_sha256"]}
    changes: list[Change] = []
    for name in _RECORDED:
        if then.get(name) != now[name]:
            changes.append((name, then.get(name), now[name]))
    if [name for name, _, _ in changes] == ["micro_batches"] and not allow_change:
        _refuse_other_processes(resumption.run, then, now)
    if changes:
        paths = ("data.files", "data.val_files", "data.train_file", "data.val_file", "data.tokenizer", "model.path")
        in_config = differences(upgraded_values(then["config"]), now["config"])
        changes += [change for change in in_config if change[0] in paths]
    refuse_changes(checkpoint, changes, allow_change)
    warn_of_changed_code(then, now.get("plugins", {}))
    if then.get("precision") not in (None, now["precision"]):
        warn(
            "TRAIN",
            f"the run was computed in {then['precision']} and continues in {now['precision']}, which this device "
            "can compute: from here on it is not bit-exact with an uninterrupted run",
        )
    if then.get("device") not in (None, now["device"]):
        warn("TRAIN", f"the run moves from {then['device']} to {now['device']}: results are not bit-exact across them")
    if then.get("architecture") not in (None, now["architecture"]):
        warn(
            "TRAIN",
            f"this run was trained on {then['architecture']} and continues on {now['architecture']}: from here on it "
            "is not bit-exact with an uninterrupted run (docs/guarantees.md)",
        )


def check_data_types(resumption: Resumption, module: nn.Module, allow_change: bool) -> None:
    """Refuse trained weights of another data type, to which loading would round them. That of frozen weights depends
    on the device."""
    checkpoint = resumption.checkpoint
    if checkpoint is None:
        return
    stored = checkpoint.dtypes("model")
    changes: list[Change] = []
    for name, parameter in module.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        if parameter.requires_grad and stored.get(name, dtype) != dtype:
            changes.append((f"data type of {name}", stored[name], dtype))
    refuse_changes(checkpoint, changes[:1], allow_change)


def _refuse_other_processes(run: RunDirectory, then: dict[str, Any], now: dict[str, Any]) -> None:
    """With trainer.scale_batch, as in version 1, another number of processes is another batch."""
    before = then.get("world_size")
    processes = now["world_size"]
    count = then["micro_batches"]
    if before in (None, processes):
        return
    remedy = (
        f"Resume it with {plural(before, 'process')}, or pass --allow-config-change to continue with another batch."
    )
    if processes <= count:
        remedy += (
            f" To keep the batch with {plural(processes, 'process')}, pass --set trainer.scale_batch=false "
            f"--set trainer.grad_accum_steps={count}."
        )
    raise UsageError(
        f"Run '{run.run_id}' was trained with {plural(before, 'process')}, and this is {plural(processes, 'process')}. "
        "Its config counts trainer.grad_accum_steps per process (trainer.scale_batch), so a step would have "
        f"{plural(now['micro_batches'], 'micro-batch')} instead of {count}.",
        remedy=remedy,
    )


def warn_of_changed_code(then: dict[str, Any], now: dict[str, dict[str, Any]]) -> None:
    """Warn if the source of a plugin has changed since the checkpoint was saved. It is not refused: most changes,
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
    changed = [f"{path}: {_shown(old)} -> {_shown(new)}" for path, old, new in changes]
    if not changed:
        return
    if allow_change:
        warn("TRAIN", f"resuming with a changed config: {'; '.join(changed)}")
        return
    raise UsageError(
        f"{checkpoint.path} belongs to a run with another config or other data:\n  - " + "\n  - ".join(changed),
        remedy="Undo the changes, start a new run, or pass --allow-config-change to resume anyway.",
    )


def _shown(value: Any) -> str:
    """Stages of a mixture in words, other values as they are."""
    is_stages = isinstance(value, list) and all(isinstance(each, dict) and "from_step" in each for each in value)
    if not is_stages:
        return repr(value)
    stages = [f"weights {', '.join(map(str, each['weights']))} from step {each['from_step']} on" for each in value]
    return "; ".join(stages) or "none"


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
        load_tensors(module, optimizer, set(checkpoint.dtypes("optimizer")), checkpoint.read_into)
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
    log_resumed(checkpoint.path, progress.step)
    return progress
