"""The loop. Where it is decides what it does next, so a resumed run does exactly what the undisturbed one does."""

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError

from llmtrain.config.schema import TrainerSection
from llmtrain.data.batches import Batch, EvalBatches
from llmtrain.errors import ResumeMe, TrainingStopped
from llmtrain.logs import log, warn
from llmtrain.runs.lock import RunLock
from llmtrain.tracking.base import Metrics, NullTracker
from llmtrain.training.checkpoint import CheckpointStore
from llmtrain.training.evaluate import evaluate
from llmtrain.training.faults import fault
from llmtrain.training.optim import lr_at
from llmtrain.training.shutdown import StopFlag
from llmtrain.training.state import Progress, model_tensors, optimizer_tensors
from llmtrain.training.step import Stepper, StepResult
from llmtrain.training.throughput import Throughput


@dataclass
class Trainer:
    config: TrainerSection
    stepper: Stepper
    train_batches: Iterator[Batch]
    eval_batches: EvalBatches
    store: CheckpointStore
    tracker: NullTracker
    progress: Progress
    throughput: Throughput
    lock: RunLock
    stop: StopFlag
    recorded: dict[str, Any]
    """What a checkpoint keeps besides tensors and progress: config, data fingerprint, versions."""
    saved: tuple[int, int] = (0, 0)
    """(step, evaluated step) of the newest checkpoint: an evaluation after a save makes it worth saving again."""
    _is_cold: bool = True
    _unread: list[tuple[int, StepResult]] = field(default_factory=list)

    def fit(self) -> None:
        """Train to max_steps. Raises ResumeMe when told to stop."""
        try:
            self._loop()
        except torch.OutOfMemoryError as problem:
            raise TrainingStopped(
                f"Out of GPU memory after step {self.progress.step}: {str(problem).partition('. Of the')[0]}.",
                remedy="In a new run, halve trainer.micro_batch_size and double trainer.grad_accum_steps.",
            ) from None

    def _loop(self) -> None:
        self.throughput.restart()
        while True:
            if self._evaluation_due() and not self.stop.requested:
                self._evaluate()
            if self._save_due() or self.stop.requested:
                self._save()
            if self.stop.requested:
                raise ResumeMe(f"Stopped at step {self.progress.step} as told.")
            if self.progress.step >= self.config.max_steps:
                return
            self._train_step()

    def _train_step(self) -> None:
        step = self.progress.step
        batches = [next(self.train_batches) for _ in range(self.config.grad_accum_steps)]
        result = self.stepper.train_step(step, lr_at(step, self.config), batches)
        self.progress.step += 1
        self.progress.tokens += sum(batch.target_count for batch in batches)
        self.throughput.count_step()
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
        }
        speed = self.throughput.read()
        if speed:
            rate, seconds = speed
            metrics["train/tokens_per_second"] = rate
            metrics["train/seconds_left"] = (self.config.max_steps - step) * seconds
            mfu = self.throughput.mfu(rate)
            if mfu is not None:
                metrics["train/mfu"] = mfu
        self.tracker.log(step, metrics)

    def _read_losses(self) -> float:
        """Losses since the last reading, fetched at once (each fetch waits for the GPU); the last one. Stops at the
        first that is not a number: steps after it were wasted, but nothing of them is saved. Gradients are looked
        at too: an infinite one spoils the weights although the loss before it was fine."""
        results = [torch.stack([result.loss, result.grad_norm.float()]) for _, result in self._unread]
        values = torch.stack(results).tolist() if results else []
        for (step, _), (loss, grad_norm) in zip(self._unread, values, strict=True):
            if not math.isfinite(loss + grad_norm):
                what = "loss" if not math.isfinite(loss) else "gradient"
                value = loss if what == "loss" else grad_norm
                size = self.config.micro_batch_size * self.config.grad_accum_steps
                raise TrainingStopped(
                    f"The {what} of step {step} is {value}; its samples are {(step - 1) * size} to {step * size - 1}.",
                    remedy="Lower trainer.lr or raise trainer.warmup_steps, then resume from the last checkpoint with "
                    "--allow-config-change, or look at those samples.",
                )
            self.progress.last_train_loss = loss
        self._unread.clear()
        return self.progress.last_train_loss or 0.0

    def _evaluation_due(self) -> bool:
        return self._due(self.config.eval_every_steps) and self.progress.step > self.progress.evaluated_step

    def _due(self, every: int | None) -> bool:
        """Whether this step is the last, or one of every so many."""
        step = self.progress.step
        return step == self.config.max_steps or (every is not None and step % every == 0)

    def _evaluate(self) -> None:
        with self._pause():
            step = self.progress.step
            fault("evaluate", step)
            result = evaluate(
                self.stepper.module,
                self.stepper.loss,
                self.eval_batches,
                self.stepper.device,
                self.stepper.autocast,
                stop=lambda: self.stop.requested,
            )
            if result is None:
                return  # told to stop: done again when the run goes on
            if not math.isfinite(result.loss):
                raise TrainingStopped(f"The validation loss after step {step} is {result.loss}.")
            best = self.progress.best_val_loss
            is_best = best is None or result.loss < best
            if is_best:
                self.progress.best_val_loss, self.progress.best_step = result.loss, step
            self.progress.last_val_loss, self.progress.evaluated_step = result.loss, step
            self.tracker.log(
                step,
                {"val/loss": result.loss, "val/perplexity": result.perplexity, "val/is_best": float(is_best)},
            )

    def _save_due(self) -> bool:
        step = self.progress.step
        wanted = self._due(self.config.save_every_steps) or self.progress.best_step == step
        return step > 0 and wanted and not self._is_saved()

    def _is_saved(self) -> bool:
        return self.saved == (self.progress.step, self.progress.evaluated_step)

    def _save(self) -> None:
        step = self.progress.step
        if step == 0 or self._is_saved():
            return
        with self._pause():  # it has looked at the losses: what follows one that is not a number is never saved
            started = time.perf_counter()
            self.lock.check()
            try:
                self._write_checkpoint(step)
            except (OSError, SafetensorError) as problem:
                self._save_failed(step, problem)
                return
            self.saved = (step, self.progress.evaluated_step)
            self._point_and_prune(step)
            log("SAVE", f"step_{step} in {time.perf_counter() - started:.2f} s", fields={"step": step})

    def _write_checkpoint(self, step: int) -> None:
        module, optimizer = self.stepper.module, self.stepper.optimizer
        tensors = {"model": model_tensors(module), "optimizer": optimizer_tensors(module, optimizer)}
        state = {"progress": self.progress.as_dict(), **self.recorded}
        self.tracker.saved(step)
        self.store.save(step, tensors, state, self.lock.token, publish=self.lock.check)

    def _point_and_prune(self, step: int) -> None:
        """Housekeeping after a checkpoint is complete; when it fails nothing is lost."""
        self.lock.check()
        try:
            self.store.point("latest", step)
            self.store.point("best", self.progress.best_step)
            fault("save_before_prune", step)
            self.lock.check()
            self.store.prune(self.config.keep_checkpoints, self.progress.best_step)
        except OSError as problem:
            warn("SAVE", f"step_{step} is saved, but the pointers or old checkpoints could not be updated: {problem}")

    def _save_failed(self, step: int, problem: Exception) -> None:
        self.lock.check()  # another owner may have cleared away what was being written
        what = f"The checkpoint of step {step} could not be written: {problem}. The earlier ones are whole."
        if step == self.config.max_steps or self.stop.requested:
            raise TrainingStopped(what, remedy="Free some space, then go on with --resume.") from None
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
