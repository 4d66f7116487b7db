"""The training loop. What it does next depends only on its position, so a resumed run repeats the uninterrupted one."""

import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch

from llmtrain.checkpoint.artifacts import Artifacts
from llmtrain.checkpoint.saver import Saver
from llmtrain.checkpoint.state import TrainState, model_tensors, optimizer_tensors
from llmtrain.checkpoint.store import CheckpointRequest
from llmtrain.config.trainer import TrainerSection
from llmtrain.core.fault_injection import inject_fault
from llmtrain.core.files import is_full
from llmtrain.core.logs import warn
from llmtrain.data.batches import Batch, TrainBatches
from llmtrain.data.tokenizers.base import TokenBytes
from llmtrain.distributed.batch_split import MicroBatchRange
from llmtrain.distributed.world import World
from llmtrain.errors import Interrupted, TrainingFailed
from llmtrain.tracking.base import Metrics, Tracker
from llmtrain.training.components import Components
from llmtrain.training.context import RunContext
from llmtrain.training.eval_prompts import EvalPrompts
from llmtrain.training.eval_tasks import EvalTasks, tasks_are_due
from llmtrain.training.evaluate import evaluate
from llmtrain.training.memory_errors import out_of_memory
from llmtrain.training.mixture import source_scores, source_use
from llmtrain.training.objectives.base import Objective
from llmtrain.training.schedule import lr_at
from llmtrain.training.start_up import record_start
from llmtrain.training.step import Stepper, StepResult, TokenCounts
from llmtrain.training.tasks.score import TaskScore, logged_metrics
from llmtrain.training.throughput import Activity, Throughput, Timing, peak_memory_bytes
from llmtrain.training.unused_parameters import report_unused
from llmtrain.training.watchdog import Watchdog


@dataclass
class Trainer:
    context: RunContext
    components: Components
    stepper: Stepper
    stream: Generator[Batch]
    """This rank's micro-batches, in order."""
    share: MicroBatchRange
    """Which micro-batches of a step belong to this rank."""
    saver: Saver
    artifacts: Artifacts
    eval_prompts: EvalPrompts
    eval_tasks: EvalTasks
    watchdog: Watchdog
    tracker: Tracker
    throughput: Throughput
    state: TrainState
    saved: tuple[int, int] = (0, 0)
    """(step, evaluated step) of the newest checkpoint: a step that was evaluated after its save is saved again."""
    _saved_before: tuple[int, int] = (0, 0)
    _is_warming_up: bool = True
    _unread: list[tuple[int, StepResult]] = field(default_factory=list)
    timing: Timing = field(default_factory=Timing)

    @property
    def config(self) -> TrainerSection:
        return self.context.config.trainer

    @property
    def world(self) -> World:
        return self.context.world

    @property
    def objective(self) -> Objective:
        return self.components.objective

    @property
    def train_batches(self) -> TrainBatches:
        return self.components.train_batches

    def fit(self) -> None:
        """Train to the last step. Raises Interrupted after SIGTERM or Ctrl-C."""
        try:
            self._loop()
        except RuntimeError as problem:
            what = out_of_memory(problem)
            if what is None:
                raise
            is_gpu = isinstance(problem, torch.OutOfMemoryError)
            memory = "GPU memory" if is_gpu else "memory"
            step = self.state.step + 1
            raise TrainingFailed(
                f"Out of {memory} in step {step} ({self.train_batches.describe_samples(step)}): {what}.",
                remedy="In a new run, halve trainer.micro_batch_size and double trainer.grad_accum_steps.",
                reason="gpu_memory" if is_gpu else None,
            ) from None

    def _loop(self) -> None:
        self.tracker.activity(self.context.start_up.begin_steps())
        self.throughput.restart()
        while True:
            if self._evaluation_due() and not self._is_interrupted():
                self._evaluate()
            if self._save_due():
                self._save(is_last_chance=self._is_finished())
            if self._is_finished():
                if self._is_interrupted():
                    self._save_and_exit()
                return
            batches = self._next_batches()
            counts, is_interrupted = self._exchange(batches)
            if is_interrupted:
                self._save_and_exit()
            self._train_step(batches, counts)

    def _is_finished(self) -> bool:
        return self.state.step >= self.config.steps or self.stopped_early

    @property
    def stopped_early(self) -> bool:
        patience = self.config.early_stopping_patience
        return patience is not None and self.state.evaluations_since_best >= patience

    def _is_interrupted(self) -> bool:
        """Whether any rank received a signal: all save the same step and exit together."""
        return self.world.control.any(self._is_interrupted_here())

    def _is_interrupted_here(self) -> bool:
        """Whether this rank received a signal."""
        self.watchdog.tick(self.state.step)
        return self.context.stop.requested

    def _next_batches(self) -> list[Batch]:
        batches = [next(self.stream) for _ in range(self.share.count)]
        if self.share.count < self.share.rounds:
            batches.append(batches[-1].without_targets())
        return batches

    def _exchange(self, batches: Sequence[Batch]) -> tuple[TokenCounts, bool]:
        """The step's token counts and whether any rank received a signal: the only control collective per step."""
        targets = sum(batch.target_count for batch in batches)
        inputs = sum(batch.token_count for batch in batches)
        items = sum(self.objective.items(batch) for batch in batches)
        *sums, interrupted = self.world.control.sums([targets, inputs, items, int(self._is_interrupted_here())])
        return TokenCounts(*sums), interrupted > 0

    def _save_and_exit(self) -> None:
        self._save(is_last_chance=True)
        if self.state.step == 0:
            raise Interrupted("Interrupted before step 1.")
        raise Interrupted(f"Interrupted at step {self.state.step}; checkpoint saved.")

    def _train_step(self, batches: Sequence[Batch], counts: TokenCounts) -> None:
        step = self.state.step
        result = self.stepper.train_step(step, batches, self.share.first, counts)
        self.state.step += 1
        self.state.tokens += counts.targets
        self.state.epoch = self.train_batches.epochs_after(self.state.step)
        self.throughput.count_step(counts.inputs)
        self._unread.append((self.state.step, result))
        if self._is_warming_up:
            # The first step of a process allocates and compiles, so its time is not counted.
            self._read_losses()
            self._is_warming_up = False
            self.context.start_up.end_first_step(self.timing)
            if self.world.is_first:
                record_start(self.context.run, self.context.generation, self.timing)
            report_unused(self.stepper.model.module, result.without_gradient, self.state.step)
            self.throughput.restart()
        self.tracker.step(self.state.step, self._seconds_left())
        if self._is_due(self.config.log_every_steps):
            self._log(result)

    def _log(self, result: StepResult) -> None:
        self.context.lock.check()
        step = self.state.step
        self._read_losses()
        window = self.state.window_metrics()
        metrics: Metrics = {
            "train/loss": self.state.end_window(),
            **{f"train/{name}": value for name, value in zip(self.objective.metric_names, window, strict=False)},
            "train/lr": lr_at(step - 1, self.config),
            "train/grad_norm": float(result.grad_norm),
            "train/tokens": self.state.tokens,
            "train/epoch": self.train_batches.epochs_at(self.state.step),
            **source_use(self.train_batches, step),
        }
        rate = self.throughput.read()
        seconds_left = self._seconds_left()
        if rate is not None and seconds_left is not None:
            metrics["train/tokens_per_second"] = rate
            metrics["train/seconds_left"] = seconds_left
            mfu = self.throughput.mfu(rate)
            if mfu is not None:
                metrics["train/mfu"] = mfu
        if self.world.device.type == "cuda":
            metrics["train/peak_memory_bytes"] = peak_memory_bytes(self.world.device)
        self.tracker.log(step, metrics)

    def _seconds_left(self) -> float | None:
        return self.throughput.seconds_left(self.config.steps - self.state.step)

    def _read_losses(self) -> None:
        """Fetch the losses since the last call, in one transfer: each waits for the GPU.

        Raises at the first loss or gradient norm that is not finite. Steps after it were wasted, but none of them has
        been saved."""
        if not self._unread:
            return
        # One row per step: for each of this rank's micro-batches its loss and metrics, then the gradient norm (equal on
        # all ranks).
        rows = []
        for _, result in self._unread:
            each = torch.column_stack([result.losses, result.metrics])  # (micro-batches, 1 + metrics)
            rows.append(torch.cat([each.reshape(-1), result.grad_norm.float().reshape(1)]))
        by_rank = self.world.control.gather_tensors(torch.stack(rows)).tolist()  # (ranks, steps, values)
        width = 1 + len(self.objective.metric_names)
        for index, (step, _) in enumerate(self._unread):
            # Summed in the order of the micro-batches, so that it does not depend on which rank computed which.
            values: list[float] = []
            for of_rank in by_rank:
                values += of_rank[index][:-1]
            loss, *metrics = (sum(values[column::width]) for column in range(width))
            self._check_finite(step, loss, by_rank[0][index][-1])
            if self.train_batches.epoch_ended_at(step - 1):
                self.state.end_epoch()
            self.state.add_train_loss(loss, metrics)
        self._unread.clear()

    def _check_finite(self, step: int, loss: float, grad_norm: float) -> None:
        """An infinite gradient corrupts the weights even if the loss was finite."""
        if math.isfinite(loss + grad_norm):
            return
        what = f"loss of step {step} is {loss}"
        if math.isfinite(loss):
            what = f"gradient of step {step} is {grad_norm}"
        raise TrainingFailed(
            f"The {what}; the step read {self.train_batches.describe_samples(step)}.",
            remedy="Lower trainer.lr or raise trainer.warmup_steps, then resume from the last checkpoint with "
            "--allow-config-change, or check those samples.",
            reason="not_finite",
        )

    def _ended_epoch(self) -> int | None:
        """The number of the epoch that ended with this step, if trainer.max_epochs is set."""
        return self.train_batches.epoch_ended_at(self.state.step) if self.config.max_epochs else None

    def _is_due(self, every: int | None) -> bool:
        """Whether this step is the last one, the last of an epoch, or a multiple of `every`."""
        if self._is_finished() or self._ended_epoch() is not None:
            return True
        return every is not None and self.state.step % every == 0

    def _evaluation_due(self) -> bool:
        return self._is_due(self.config.eval_every_steps) and self.state.step > self.state.evaluated_step

    @cached_property
    def _token_bytes(self) -> TokenBytes | None:
        """None for examples: only part of their text counts."""
        prepared = self.components.prepared
        return prepared.tokenizer.token_bytes() if prepared.is_text else None

    def _evaluate(self) -> None:
        with self._paused("evaluating"):
            step = self.state.step
            inject_fault("evaluate", step)
            batches = self.components.eval_batches
            result = evaluate(self.stepper.model, batches, self.world, self._is_interrupted, self._token_bytes)
            if result is None:
                return  # interrupted: the resumed run repeats the evaluation
            if not math.isfinite(result.loss):
                raise TrainingFailed(f"The validation loss after step {step} is {result.loss}.", reason="not_finite")
            answers = self.eval_prompts.answer(self._is_interrupted_here)
            if answers is None:
                return
            metrics: Metrics = {"val/loss": result.loss}
            if self.objective.is_likelihood:
                metrics["val/perplexity"] = result.perplexity
            metrics |= {f"val/{name}": value for name, value in result.metrics.items()}
            if result.bits_per_byte is not None:
                metrics["val/bits_per_byte"] = result.bits_per_byte
            metrics |= source_scores(result)
            scores: list[TaskScore] | None = []
            if tasks_are_due(self.config, step, self._ended_epoch(), is_last=step >= self.config.steps):
                scores = self.eval_tasks.score(self._is_interrupted)
            if scores is None:
                return
            metrics |= logged_metrics(scores)
            is_best = self.state.note_evaluation(metrics, self.config.best_metric)
            self.context.lock.check()
            self.tracker.log(step, {**metrics, "val/is_best": float(is_best), **self._epoch_metrics()})
            if self.world.is_first:
                self._save_answers(answers)
                self.eval_tasks.save(step, scores)

    def _save_answers(self, answers: list[dict[str, str]]) -> None:
        if not answers:
            return
        try:
            self.tracker.samples(self.state.step, self.eval_prompts.save(self.state.step, answers))
        except OSError as problem:
            warn("EVAL", f"the answers to trainer.eval_prompts could not be saved; training continues: {problem}")

    def _epoch_metrics(self) -> Metrics:
        epoch = self._ended_epoch()
        if epoch is None:
            return {}
        loss = self.state.epoch_loss_sum / max(1, self.state.epoch_steps)
        return {"epoch/number": epoch, "epoch/train_loss": loss}

    def _save_due(self) -> bool:
        step = self.state.step
        is_due = self._is_due(self.config.save_every_steps) or self.state.best_step == step
        return step > 0 and is_due and not self._is_saved()

    def _is_saved(self) -> bool:
        return self.saved == (self.state.step, self.state.evaluated_step)

    def _save(self, is_last_chance: bool) -> None:
        step = self.state.step
        self._finish_save(is_last_chance=False)
        if step == 0 or self._is_saved():
            return
        # Entering `_paused` reads the losses and raises if one is NaN, so that no weights after a NaN are saved.
        with self._paused("saving"):
            self.context.lock.check()
            self.tracker.saved(step)
            self._saved_before = self.saved
            self.saved = (step, self.state.evaluated_step)
            self.saver.save(self._checkpoint_request(), is_last_chance)
            if is_last_chance or not self.config.async_save:
                self._finish_save(is_last_chance)

    def _checkpoint_request(self) -> CheckpointRequest:
        module = self.stepper.model.module
        weights = model_tensors(module)  # first: FSDP shards the weights again, as the optimizer knows them
        optimizer_state = optimizer_tensors(module, self.stepper.optimizer)
        return CheckpointRequest(
            step=self.state.step,
            tensors={"model": weights, "optimizer": optimizer_state},
            state={"progress": self.state.as_dict(), **self.components.recorded},
            write_extra_files=self.artifacts.extra_files(module, self.state),
            epoch=self._ended_epoch(),
        )

    def _finish_save(self, is_last_chance: bool) -> None:
        """Wait for the save in state. A failed save is repeated at the next one, if there is a next one."""
        try:
            self.saver.finish()
        except OSError as problem:
            # A new owner may have deleted the partial checkpoint; then all ranks raise Superseded.
            self.world.control.on_rank0(self.context.lock.check)
            step = self.saved[0]
            self.saved = self._saved_before
            what = f"The checkpoint of step {step} could not be written: {problem}. Earlier checkpoints are intact."
            if is_last_chance:
                # safetensors raises an error without errno, most often because the disk is full
                is_space = is_full(problem) or problem.errno is None
                remedy = "Free some space" if is_space else "Check the storage of the run"
                raise TrainingFailed(
                    what, remedy=f"{remedy}, then resume with --resume.", reason="disk_full" if is_space else None
                ) from None
            warn("SAVE", f"{what} Training continues; the next save tries again.")

    def repair_artifacts(self) -> None:
        """On resume: create what a killed process did not publish."""
        ended_at = self.train_batches.epoch_ended_at if self.config.max_epochs else lambda _: None
        self.artifacts.repair(self.state.epoch, ended_at)

    def sample(self) -> tuple[str, str]:
        """A prompt, which may be empty, and what the model generates from it, for the result of the run."""
        return self.eval_prompts.sample(self._is_interrupted_here)

    @contextmanager
    def _paused(self, activity: Activity) -> Iterator[None]:
        """Evaluation and saving do not count as training time. Raises TrainingFailed if a loss so far is NaN."""
        self.tracker.activity(activity)
        self._read_losses()  # waits for the GPU, so that its steps count as training time
        if self.state.step:
            self.throughput.read()
        started = time.perf_counter()
        yield
        self.timing.add(activity, time.perf_counter() - started)
        if activity == "evaluating":  # a save compiles nothing
            self.context.start_up.keep_compiled_code()
        self.tracker.activity("")
        if self.state.step:
            self.throughput.restart()
