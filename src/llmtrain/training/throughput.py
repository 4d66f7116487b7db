"""How fast training goes: tokens a second of the step loop alone, and how much of the GPU's arithmetic that uses."""

import resource
import sys
import time

import torch

# Dense bf16 peak of one GPU in FLOP/s, by the makers' data sheets.
_PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
    "T4": 65e12,
}


class Throughput:
    """A stopwatch over the steps; evaluation and saving stop it."""

    def __init__(self, device: torch.device, flops_per_token: float, world_size: int) -> None:
        self._device, self._flops = device, flops_per_token
        peak = peak_flops(device)
        self._peak = peak * world_size if peak else None
        self._mark = time.perf_counter()
        self._steps = self._tokens = self._total_tokens = 0
        self._total_seconds = 0.0

    def restart(self) -> None:
        """Begin anew after a pause, or after the first step, which warms up."""
        self._mark, self._steps, self._tokens = time.perf_counter(), 0, 0

    def count_step(self, tokens: int) -> None:
        self._steps += 1
        self._tokens += tokens

    def read(self) -> tuple[float, float] | None:
        """(tokens a second, seconds a step) since the last reading, None when no step was counted. The caller has
        waited for the device."""
        now = time.perf_counter()
        seconds, steps, tokens = now - self._mark, self._steps, self._tokens
        if not steps:
            return None
        self._total_seconds += seconds
        self._total_tokens += tokens
        self._mark, self._steps, self._tokens = now, 0, 0
        return tokens / seconds, seconds / steps

    @property
    def overall(self) -> float:
        return self._total_tokens / self._total_seconds if self._total_seconds else 0.0

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model-FLOPs utilisation: the share of the GPU's peak spent on the model; None where the peak is unknown."""
        return tokens_per_second * self._flops / self._peak if self._peak else None


def peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory in use so far: of the GPU where there is one, else of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
