"""Training throughput: tokens per second of the step loop alone, and model FLOPs utilization."""

import re
import resource
import sys
import time

import torch

# Dense bf16 peak of one GPU in FLOP/s, from the vendors' data sheets.
_PEAK_FLOPS = {
    "H200": 989e12,
    "GH200": 989e12,
    "H100": 989e12,
    "B200": 2250e12,
    "GB200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
    "T4": 65e12,
}


class Throughput:
    """Times the training steps, without evaluation and saving."""

    def __init__(self, device: torch.device, flops_per_token: float, world_size: int) -> None:
        self._device, self._flops = device, flops_per_token
        peak = peak_flops(device)
        self._peak = peak * world_size if peak else None
        self._started = time.perf_counter()
        self._steps = self._tokens = self._total_tokens = 0
        self._total_seconds = 0.0
        self._seconds_per_step: float | None = None

    def restart(self) -> None:
        """Start timing, without counting what has passed since the last reading."""
        self._started, self._steps, self._tokens = time.perf_counter(), 0, 0

    def count_step(self, tokens: int) -> None:
        self._steps += 1
        self._tokens += tokens

    def read(self) -> float | None:
        """Tokens per second since the last reading; None if there was no step. The caller must have waited for the
        device."""
        now = time.perf_counter()
        seconds, steps, tokens = now - self._started, self._steps, self._tokens
        if not steps:
            return None
        self._total_seconds += seconds
        self._total_tokens += tokens
        self._started, self._steps, self._tokens = now, 0, 0
        self._seconds_per_step = seconds / steps
        return tokens / seconds

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


def peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for model, flops in _PEAK_FLOPS.items() if re.search(rf"\b{model}\b", name)), None)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far, of the GPU or, without one, of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
