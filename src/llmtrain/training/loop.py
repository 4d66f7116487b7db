"""The loop. Where it is decides what it does next, so a resumed run does exactly what the undisturbed one does."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from llmtrain.checkpoint.saver import Saver
from llmtrain.checkpoint.state import TrainState
from llmtrain.config.trainer import TrainerSection
from llmtrain.data.batches import Batch, EvalBatches, TrainBatches
from llmtrain.distributed.batch_split import Share
from llmtrain.distributed.world import World
from llmtrain.errors import Interrupted, TrainingFailed
from llmtrain.fault_injection import inject_fault
from llmtrain.files import is_full
from llmtrain.logs import warn
from llmtrain.runs.lock import NullLock
from llmtrain.tracking.base import Metrics, NullTracker
from llmtrain.training.artifacts import Outputs
from llmtrain.training.evaluate import evaluate
from llmtrain.training.optim import lr_at
from llmtrain.training.shutdown import StopFlag
from llmtrain.training.step import Stepper, StepResult
from llmtrain.training.throughput import Throughput
from llmtrain.training.watchdog import Watchdog


@dataclass
class Trainer:
    config: TrainerSection
    world: World
    stepper: Stepper
    train_batches: TrainBatches
    stream: Iterator[Batch]
    """This rank's micro-batches, in order."""
    share: Share
    """Which of a step's micro-batches those are."""
    eval_batches: EvalBatches
    saver: Saver
    outputs: Outputs
    watchdog: Watchdog
    tracker: NullTracker
    progress: TrainState
    throughput: Throughput
    lock: NullLock
    stop: StopFlag
    recorded: dict[str, Any]
    """What a checkpoint keeps besides tensors and progress: config, data fingerprint, versions."""
    saved: tuple[int, int] = (0, 0)
    """(step, evaluated step) of the newest checkpoint: an evaluation after a save makes it worth saving again."""
    _saved_before: tuple[int, int] = (0, 0)
    _is_cold: bool = True
    _unread: list[tuple[int, StepResult]] = field(default_factory=list)

    def fit(self) -> None:
        """Train to the last step. Raises Interrupted when told to stop."""
        try:
            self._loop()
        except torch.OutOfMemoryError as problem:
            raise TrainingFailed(
                f"Out of GPU memory in step {self.progress.step + 1} "
                f"({self.train_batches.samples_of_step(self.progress.step + 1)}): "
                f"{str(problem).partition('. Of the')[0]}.",
                remedy="In a new run, halve trainer.micro_batch_size and double trainer.grad_accum_steps.",
                reason="gpu_memory",
            ) from None

    def repair_outputs(self) -> None:
        ended = self._ended_epoch if self.config.max_epochs else lambda _: None
        self.outputs.repair(self.progress.epoch, ended)

    def _loop(self) -> None:
        self.throughput.restart()
        while True:
            if self._evaluation_due() and not self._told_to_stop():
                self._evaluate()
            if self._save_due():
                self._save(stopping=False)
            if self._told_to_stop():
                self._save(stopping=True)
                raise Interrupted(f"Stopped at step {self.progress.step} as told.")
            if self._is_over():
                return
            self._train_step()

    def _is_over(self) -> bool:
        return self.progress.step >= self.config.steps or self.stopped_early

    @property
    def stopped_early(self) -> bool:
        patience = self.config.early_stopping_patience
        return patience is not None and self.progress.evaluations_since_best >= patience

    def _told_to_stop(self) -> bool:
        """Whether any rank was told to: all save the same step and leave together."""
        self.watchdog.tick(self.progress.step)
        return self.world.control.any(self.stop.requested)

    def _train_step(self) -> None:
        step = self.progress.step
        batches = [next(self.stream) for _ in range(self.share.count)]
        if self.share.count < self.share.rounds:
            batches.append(batches[-1].without_targets())
        result = self.stepper.train_step(step, lr_at(step, self.config), batches, self.share.first)
        self.progress.step += 1
        self.progress.tokens += result.target_count
        self.progress.epoch = self.train_batches.epochs_after(self.progress.step)
        self.throughput.count_step(result.token_count)
        self._unread.append((self.progress.step, result))
        if self._is_cold:
            # The first step of a process warms up (and compiles): it is no part of the speed.
            loss = self._read_losses()
            self._is_cold = False
            self.throughput.restart()
            if self.progress.first_train_loss is None:
                self.progress.first_train_loss = loss
        if self._due(self.config.log_every_steps):
            self._log(result)

    def _log(self, result: StepResult) -> None:
        self.lock.check()
        step = self.progress.step
        loss = self._read_losses()
        metrics: Metrics = {
            "train/loss": loss,
            "train/lr": lr_at(step - 1, self.config),
            "train/grad_norm": float(result.grad_norm),
            "train/tokens": self.progress.tokens,
            "train/epoch": self._epochs(),
        }
        speed = self.throughput.read()
        if speed:
            rate, seconds = speed
            metrics["train/tokens_per_second"] = rate
            metrics["train/seconds_left"] = (self.config.steps - step) * seconds
            mfu = self.throughput.mfu(rate)
            if mfu is not None:
                metrics["train/mfu"] = mfu
        self.tracker.log(step, metrics)

    def _read_losses(self) -> float:
        """Losses since the last reading, fetched at once (each fetch waits for the GPU); the last one. Stops at the
        first that is not a number: steps after it were wasted, but nothing of them is saved. Gradients are looked
        at too: an infinite one spoils the weights although the loss before it was fine."""
        if not self._unread:
            return self.progress.last_train_loss or 0.0
        # One row a step: this rank's micro-batches, then the norm, which is the same on all ranks.
        mine = torch.stack([torch.cat([r.losses, r.grad_norm.float().reshape(1)]) for _, r in self._unread])
        rows = self.world.control.gather_rows(mine).tolist()  # (ranks, steps, micro-batches + 1)
        for index, (step, _) in enumerate(self._unread):
            # Summed in the order of the micro-batches, so that it does not depend on who computed which.
            loss = sum(value for row in rows for value in row[index][:-1])
            grad_norm = rows[0][index][-1]
            if not math.isfinite(loss + grad_norm):
                what = "loss" if not math.isfinite(loss) else "gradient"
                value = loss if what == "loss" else grad_norm
                raise TrainingFailed(
                    f"The {what} of step {step} is {value}; it saw {self.train_batches.samples_of_step(step)}.",
                    remedy="Lower trainer.lr or raise trainer.warmup_steps, then resume from the last checkpoint with "
                    "--allow-config-change, or look at those samples.",
                    reason="not_finite",
                )
            self.progress.last_train_loss = loss
            if self._ended_epoch(step - 1):
                self.progress.epoch_loss_sum, self.progress.epoch_steps = 0.0, 0
            self.progress.epoch_loss_sum += loss
            self.progress.epoch_steps += 1
        self._unread.clear()
        return self.progress.last_train_loss or 0.0

    def _epochs(self) -> float:
        """Passes over the data so far, with the share of the one under way."""
        done = self.progress.epoch
        start, end = (self.train_batches.steps_in(epoch) for epoch in (done, done + 1))
        return done + (self.progress.step - start) / max(1, end - start)

    def _ended_epoch(self, step: int) -> int | None:
        """The number of the epoch that ended with a step."""
        epoch = self.train_batches.epochs_after(step)
        return epoch if epoch > 0 and self.train_batches.steps_in(epoch) == step else None

    def _counted_epoch(self) -> int | None:
        """The same of this step, in a run that counts epochs."""
        return self._ended_epoch(self.progress.step) if self.config.max_epochs else None

    def _evaluation_due(self) -> bool:
        return self._due(self.config.eval_every_steps) and self.progress.step > self.progress.evaluated_step

    def _due(self, every: int | None) -> bool:
        """Whether this step is the last, the last of an epoch, or one of every so many."""
        step = self.progress.step
        return self._is_over() or self._counted_epoch() is not None or (every is not None and step % every == 0)

    def _evaluate(self) -> None:
        with self._pause():
            step = self.progress.step
            inject_fault("evaluate", step)
            result = evaluate(
                self.stepper.wrapped.module,
                self.stepper.loss,
                self.eval_batches,
                self.world,
                self.stepper.autocast,
                stop=self._told_to_stop,
            )
            if result is None:
                return  # told to stop: done again when the run goes on
            if not math.isfinite(result.loss):
                raise TrainingFailed(f"The validation loss after step {step} is {result.loss}.", reason="not_finite")
            answers = self.outputs.answer_prompts(self._told_to_stop)
            if answers is None:
                return
            progress = self.progress
            is_best = progress.best_val_loss is None or result.loss < progress.best_val_loss
            if is_best:
                progress.best_val_loss, progress.best_step, progress.evaluations_since_best = result.loss, step, 0
            else:
                progress.evaluations_since_best += 1
            progress.last_val_loss, progress.evaluated_step = result.loss, step
            self.lock.check()
            metrics = {"val/loss": result.loss, "val/perplexity": result.perplexity, "val/is_best": float(is_best)}
            self.tracker.log(step, {**metrics, **self._epoch_metrics()})
            if answers and self.world.is_first:
                self._keep_answers(answers)

    def _keep_answers(self, answers: list[dict[str, str]]) -> None:
        try:
            self.tracker.samples(self.progress.step, self.outputs.keep_answers(self.progress.step, answers))
        except OSError as problem:
            warn("EVAL", f"what the model answered could not be kept; training goes on: {problem}")

    def _epoch_metrics(self) -> Metrics:
        epoch = self._counted_epoch()
        if epoch is None:
            return {}
        loss = self.progress.epoch_loss_sum / max(1, self.progress.epoch_steps)
        return {"epoch/number": epoch, "epoch/train_loss": loss}

    def _save_due(self) -> bool:
        step = self.progress.step
        wanted = self._due(self.config.save_every_steps) or self.progress.best_step == step
        return step > 0 and wanted and not self._is_saved()

    def _is_saved(self) -> bool:
        return self.saved == (self.progress.step, self.progress.evaluated_step)

    def _save(self, stopping: bool) -> None:
        step = self.progress.step
        self._finish_save(is_last_chance=False)
        if step == 0 or self._is_saved():
            return
        with self._pause():  # it has looked at the losses: what follows one that is not a number is never saved
            self.lock.check()
            self.tracker.saved(step)
            self._saved_before, self.saved = self.saved, (step, self.progress.evaluated_step)
            state = {"progress": self.progress.as_dict(), **self.recorded}
            companion, after = self.outputs.with_checkpoint(self.progress, self._counted_epoch())
            self.saver.save(step, self.stepper.module, self.stepper.optimizer, state, companion, after)
            is_last_chance = stopping or self._is_over()
            if is_last_chance or not self.config.async_save:
                self._finish_save(is_last_chance)

    def _finish_save(self, is_last_chance: bool) -> None:
        """Wait for the save that was begun. One that failed is tried again at the next occasion, if there is one."""
        try:
            self.saver.finish()
        except OSError as problem:
            # Another owner may have cleared away what was being written; then all ranks end as superseded.
            self.world.control.on_rank0(self.lock.check)
            step, self.saved = self.saved[0], self._saved_before
            what = f"The checkpoint of step {step} could not be written: {problem}. The earlier ones are whole."
            if is_last_chance:
                # safetensors does not say why a write failed (its error has no number): most often the disk is full
                is_space = is_full(problem) or problem.errno is None
                remedy = "Free some space" if is_space else "Check the storage of the run"
                raise TrainingFailed(
                    what, remedy=f"{remedy}, then resume with --resume.", reason="disk_full" if is_space else None
                ) from None
            warn("SAVE", f"{what} Training goes on; the next save tries again.")

    def _pause(self) -> AbstractContextManager[None]:
        """Evaluation and saving do not count as training time."""
        self._read_losses()  # waits for the GPU, so that its steps are counted to the training before the pause
        return _Paused(self.throughput) if self.progress.step else nullcontext()


class _Paused(AbstractContextManager[None]):
    def __init__(self, throughput: Throughput) -> None:
        self._throughput = throughput

    def __enter__(self) -> None:
        self._throughput.read()

    def __exit__(self, *_: object) -> None:
        self._throughput.restart()
