"""The log lines that say how far a run is. They are written and read here, so no other code depends on their wording.

As JSON (logging.json_output) a line has its values as fields. A tagged line has them as parts between bars,
`step 5/30 | loss 5.1922 | 0:00:09 left`: the log of a pod is text by default, and `status` has nothing else to read
without running a command in the pod.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from llmtrain.core.logs import log, split_line
from llmtrain.core.text import format_bytes

_TAGS = ("TRAIN", "EVAL", "EPOCH", "DONE")
# Repetitions are bounded, because a log may contain anything that slows a regular expression down.
_NUMBER = r"(-?[\d,]{0,24}\.?\d{1,24}(?:e[+-]?\d{1,3})?|nan|-?inf)"
_STEP = re.compile(r"(?:^|\| )step (\d{1,15})/(\d{1,15}) \|")
_LOSS = re.compile(rf"(?:^|\| )loss {_NUMBER}")
_VAL_LOSS = re.compile(rf"\bval loss {_NUMBER}")
_RATE = re.compile(rf"{_NUMBER} tok/s")
_LEFT = re.compile(r"\| ([^|]+) left$")
_DURATION = re.compile(r"(?:(\d{1,9}) days?, )?(\d{1,2}):(\d\d):(\d\d)")
_PEAK = re.compile(r"\| peak ([\d.]{1,6}) ([kMGT]?)B\b")
_UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_DONE = re.compile(r"^(\d{1,15}) steps?, train loss|is finished already, at step (\d{1,15})")
_RESUMED = re.compile(r"resumed from \S*step_(\d{1,15})$")

_SOURCE = "val/loss/"
_MAX_SOURCES = 6
_MAX_SECONDS_LEFT = 1e10  # a log may contain anything, also what timedelta refuses

Event = Literal["step", "evaluation", "resumed", "done"]


@dataclass(frozen=True)
class ProgressLine:
    """What one line says."""

    event: Event
    step: int
    max_steps: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_second: float | None = None
    time_left: str | None = None
    seconds_left: float | None = None
    peak_memory_bytes: float | None = None
    """Of a GPU."""


def log_step(step: int, max_steps: int, metrics: Mapping[str, float]) -> None:
    parts = [f"step {step}/{max_steps}", f"loss {metrics['train/loss']:.4f}"]
    parts += _preference_parts("train", metrics)
    parts.append(f"lr {metrics['train/lr']:.2e}")
    if "train/tokens_per_second" in metrics:  # the first step of a process is not timed
        parts.append(f"{metrics['train/tokens_per_second']:,.0f} tok/s")
    if "train/mfu" in metrics:
        parts.append(f"mfu {metrics['train/mfu']:.1%}")
    if "train/peak_memory_bytes" in metrics:
        parts.append(f"peak {format_bytes(metrics['train/peak_memory_bytes'])}")
    if "train/seconds_left" in metrics:
        parts.append(f"{duration_text(metrics['train/seconds_left'])} left")
    log("TRAIN", " | ".join(parts), fields={"step": step, "max_steps": max_steps, **metrics})


def _preference_parts(split: str, metrics: Mapping[str, float]) -> list[str]:
    """Of a run on preference pairs: how often the chosen answer has the higher reward, and by how much."""
    parts = []
    if f"{split}/accuracy" in metrics:
        parts.append(f"accuracy {metrics[f'{split}/accuracy']:.1%}")
    if f"{split}/margin" in metrics:
        parts.append(f"margin {metrics[f'{split}/margin']:.4f}")
    return parts


def _source_parts(metrics: Mapping[str, float]) -> list[str]:
    """The validation loss of each source of a mixture, unless there are too many for a line."""
    losses = {name.removeprefix(_SOURCE): value for name, value in metrics.items() if name.startswith(_SOURCE)}
    if not 0 < len(losses) <= _MAX_SOURCES:
        return []
    return ["by source: " + ", ".join(f"{label} {loss:.4f}" for label, loss in losses.items())]


def log_micro_batch(step: int, number: int, count: int, seconds: float) -> None:
    """Of a step that takes long. It is not progress that `status` reads."""
    fields = {"event": "micro_batch", "micro_batch": number, "micro_batches": count}
    text = f"step {step}: micro-batch {number} of {count}, {duration_text(seconds)} in this step"
    log("TRAIN", text, fields=fields)


def log_smoke_step(epoch: int, epochs: int, step: int, steps: int, loss: float) -> None:
    """Log a step of `launch --smoke`. `steps`: the steps of one epoch."""
    fields = {"step": step, "max_steps": steps, "train/loss": loss}
    log("TRAIN", f"epoch {epoch}/{epochs} | step {step}/{steps} | loss {loss:.4f}", fields=fields)


def log_evaluation(step: int, max_steps: int, max_epochs: int | None, metrics: Mapping[str, float]) -> None:
    """Log an evaluation, and the end of an epoch if one has ended."""
    scores = [f"val loss {metrics['val/loss']:.4f}", *_preference_parts("val", metrics)]
    if "val/perplexity" in metrics:
        scores.append(f"perplexity {metrics['val/perplexity']:.2f}")
    if "val/bits_per_byte" in metrics:
        scores.append(f"bpb {metrics['val/bits_per_byte']:.3f}")
    scores += _source_parts(metrics)
    for name, value in metrics.items():
        if name.startswith("tasks/"):
            scores.append(f"{name.removeprefix('tasks/')} {value:.4f}")
    best = ""
    if metrics.get("val/is_best"):
        best = "best"
        scores.append(best)
    position = f"step {step}/{max_steps}"
    fields = {"step": step, "max_steps": max_steps, **metrics}
    log("EVAL", " | ".join([position, *scores]), fields=fields, good_news=best)
    if "epoch/number" in metrics:
        epoch = f"{metrics['epoch/number']:.0f}/{max_epochs}"
        loss = f"train loss {metrics['epoch/train_loss']:.4f}"
        log("EPOCH", " | ".join([epoch, position, loss, *scores]), fields=fields, good_news=best)


def log_resumed(checkpoint: Path, step: int) -> None:
    log("TRAIN", f"resumed from {checkpoint}", fields={"event": "resumed", "step": step})


def log_done(step: int, train_loss: float, val_loss: float, best_val_loss: float) -> None:
    noun = "step" if step == 1 else "steps"
    text = f"{step} {noun}, train loss {train_loss:.4f}, val loss {val_loss:.4f}, best {best_val_loss:.4f}"
    log("DONE", text, fields={"event": "done", "step": step})


def log_finished_before(run_id: str, step: int) -> None:
    log("DONE", f"run {run_id} is finished already, at step {step}", fields={"event": "done", "step": step})


def duration_text(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _seconds_of(text: str) -> float | None:
    """The inverse of duration_text; None for other texts."""
    found = _DURATION.fullmatch(text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def read_progress_line(line: str) -> ProgressLine | None:
    """None for any other line."""
    tag, text = split_line(line)
    if tag not in _TAGS:
        return None
    fields = json.loads(line) if line.startswith("{") else {}  # split_line has parsed it
    if "event" in fields or "max_steps" in fields:
        return _from_fields(str(tag), fields)
    return _from_text(str(tag), text)  # also the message of a JSON line of an earlier image


def _from_fields(tag: str, fields: dict[str, Any]) -> ProgressLine | None:
    step = fields.get("step")
    event = fields.get("event")
    max_steps = fields.get("max_steps")
    if not isinstance(step, int):
        return None
    if event in ("resumed", "done"):
        return ProgressLine(event, step)
    if not isinstance(max_steps, int):
        return None
    # As precise as a tagged line.
    if tag != "TRAIN":
        return ProgressLine("evaluation", step, max_steps, val_loss=_rounded(fields.get("val/loss"), 4))
    seconds = fields.get("train/seconds_left")
    time_left = None
    if isinstance(seconds, int | float) and 0 <= seconds < _MAX_SECONDS_LEFT:
        time_left = duration_text(seconds)
    else:
        seconds = None
    return ProgressLine(
        "step",
        step,
        max_steps,
        loss=_rounded(fields.get("train/loss"), 4),
        tokens_per_second=_rounded(fields.get("train/tokens_per_second"), 0),
        time_left=time_left,
        seconds_left=_rounded(seconds, 0),  # as precise as a tagged line
        peak_memory_bytes=_rounded(fields.get("train/peak_memory_bytes"), 0),
    )


def _rounded(value: object, digits: int) -> float | None:
    return round(float(value), digits) if isinstance(value, int | float) else None


def _from_text(tag: str, text: str) -> ProgressLine | None:
    if tag == "DONE":
        done = _DONE.search(text)
        return ProgressLine("done", int(done[1] or done[2])) if done else None
    resumed = _RESUMED.search(text)
    if resumed:
        return ProgressLine("resumed", int(resumed[1]))
    position = _STEP.search(text)
    if position is None:
        return None
    step = int(position[1])
    max_steps = int(position[2])
    if tag != "TRAIN":
        return ProgressLine("evaluation", step, max_steps, val_loss=_number(_VAL_LOSS, text))
    left = _LEFT.search(text)
    peak = _PEAK.search(text)
    return ProgressLine(
        "step",
        step,
        max_steps,
        loss=_number(_LOSS, text),
        tokens_per_second=_number(_RATE, text),
        time_left=left[1] if left else None,
        seconds_left=_seconds_of(left[1]) if left else None,
        peak_memory_bytes=_bytes(peak[1], peak[2]) if peak else None,
    )


def _bytes(number: str, unit: str) -> float | None:
    try:
        return float(number) * _UNITS[unit]
    except ValueError:  # 1.2.3
        return None


def _number(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.search(text)
    return float(found[1].replace(",", "")) if found else None
