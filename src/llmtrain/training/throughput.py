"""Training throughput: tokens per second of the step loop alone, and model FLOPs utilization."""

import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from llmtrain.core.gpus import gpu_of_device
from llmtrain.runs.metadata import cpu_name

Activity = Literal["evaluating", "saving"]


@dataclass
class Timing:
    """Seconds of this start that are not training, for the estimates of later runs."""

    first_step: float | None = None
    """From the call of the training to the end of the first step: data, model, compilation."""
    start: dict[str, float] = field(default_factory=dict)
    """Of each phase of the start."""
    evaluating: float = 0.0
    evaluations: int = 0
    saving: float = 0.0
    """Seconds that the loop waited for its `saves`."""
    saves: int = 0

    def add(self, activity: Activity, seconds: float) -> None:
        if activity == "evaluating":
            self.evaluating += seconds
            self.evaluations += 1
        else:
            self.saving += seconds
            self.saves += 1

    def as_dict(self) -> dict[str, Any]:
        return _rounded(asdict(self))


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    rounded: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            rounded[name] = _rounded(value)
        else:
            rounded[name] = round(value, 3) if isinstance(value, float) else value
    return rounded


class Throughput:
    """Times the training steps, without evaluation and saving."""

    def __init__(self, device: torch.device, flops_per_token: float, world_size: int) -> None:
        self._device = device
        self._flops = flops_per_token
        peak = peak_flops(device)
        self._peak = peak * world_size if peak else None
        self._started = time.perf_counter()
        self._steps = self._tokens = self._total_tokens = 0
        self._total_seconds = 0.0
        self._seconds_per_step: float | None = None

    def restart(self) -> None:
        """Start timing, without counting what has passed since the last reading."""
        self._started = time.perf_counter()
        self._steps = 0
        self._tokens = 0

    def count_step(self, tokens: int) -> None:
        self._steps += 1
        self._tokens += tokens

    def read(self) -> float | None:
        """Tokens per second since the last reading; None if there was no step. The caller must have waited for the
        device."""
        if not self._steps:
            return None
        now = time.perf_counter()
        seconds = now - self._started
        rate = self._tokens / seconds
        self._total_seconds += seconds
        self._total_tokens += self._tokens
        self._seconds_per_step = seconds / self._steps
        self._started = now
        self._steps = 0
        self._tokens = 0
        return rate

    def seconds_left(self, steps: int) -> float | None:
        """Time for this many steps, at the speed of the last reading; before the first one, since the start. None if no
        step has been timed."""
        pace = self._seconds_per_step
        if pace is None and self._steps:
            pace = (time.perf_counter() - self._started) / self._steps
        return None if pace is None else steps * pace

    @property
    def overall(self) -> float:
        """Tokens per second since the start."""
        return self._total_tokens / self._total_seconds if self._total_seconds else 0.0

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilization, as a fraction of the peak; None if the peak of the device is unknown."""
        return tokens_per_second * self._flops / self._peak if self._peak else None


def device_name(device: torch.device) -> str:
    """The model of the GPU or the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name()


def peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    gpu = gpu_of_device(device_name(device))
    return gpu.bf16_flops if gpu else None


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far, of the GPU or, without one, of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
