"""Training progress on standard error: a progress bar in a terminal, tagged log lines elsewhere."""

import logging
import sys
from datetime import timedelta
from typing import Any

from llmtrain.logs import console_handler, log
from llmtrain.tracking.base import Metrics, Status, TrackedRun, Tracker


class ConsoleTracker(Tracker):
    def __init__(self, run: TrackedRun, may_show_bar: bool = True) -> None:
        self._max_steps = run.config.trainer.steps
        self._max_epochs = run.config.trainer.max_epochs
        self._bar: Any = None
        logging_ = run.config.logging
        has_terminal = may_show_bar and sys.stderr.isatty()
        if has_terminal and not logging_.json_output and logging_.level in ("DEBUG", "INFO"):
            self._start_bar(run.resumed_from)

    def log(self, step: int, metrics: Metrics) -> None:
        position = f"step {step}/{self._max_steps}"
        if "train/loss" in metrics:
            parts = [position, f"loss {metrics['train/loss']:.4f}", f"lr {metrics['train/lr']:.2e}"]
            rate = "-"
            if "train/tokens_per_second" in metrics:  # the first step of a process is not timed
                rate = f"{metrics['train/tokens_per_second']:,.0f} tok/s"
                parts.append(rate)
            if "train/mfu" in metrics:
                parts.append(f"mfu {metrics['train/mfu']:.1%}")
            if "train/seconds_left" in metrics:
                parts.append(f"{timedelta(seconds=round(metrics['train/seconds_left']))} left")
            log("TRAIN", " | ".join(parts), fields={"step": step, **metrics})
            if self._bar is not None:
                self._bar.update(self._task, completed=step, loss=f"{metrics['train/loss']:.4f}", rate=rate)
        if "val/loss" in metrics:
            best = " | best so far" if metrics.get("val/is_best") else ""
            text = f"{position} | val loss {metrics['val/loss']:.4f} | perplexity {metrics['val/perplexity']:.2f}{best}"
            log("EVAL", text, fields={"step": step, **metrics})
            if "epoch/number" in metrics:
                self._log_epoch(position, metrics, best)

    def _log_epoch(self, position: str, metrics: Metrics, best: str) -> None:
        log(
            "EPOCH",
            f"{metrics['epoch/number']:.0f}/{self._max_epochs} | {position} | "
            f"train loss {metrics['epoch/train_loss']:.4f} | val loss {metrics['val/loss']:.4f} | "
            f"perplexity {metrics['val/perplexity']:.2f}{best}",
            fields=metrics,
        )

    def finish(self, status: Status, result: dict[str, Any] | None) -> None:  # noqa: ARG002
        if self._bar is not None:
            self._bar.stop()
            handler = console_handler()
            if handler:
                handler.removeFilter(_not_train)

    def _start_bar(self, first_step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss [bold]{task.fields[loss]}"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=Console(stderr=True),
        )
        # Other log lines are printed above the bar; those of steps are only in the bar and the log file.
        handler = console_handler()
        if handler:
            handler.addFilter(_not_train)
        self._task = self._bar.add_task("train", total=self._max_steps, completed=first_step, loss="-", rate="-")
        self._bar.start()


def _not_train(record: logging.LogRecord) -> bool:
    return getattr(record, "tag", None) != "TRAIN" or record.levelno > logging.INFO
