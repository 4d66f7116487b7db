"""World: who this process is among those of the run, and which device is its own."""

import os
from dataclasses import dataclass

import torch

from llmtrain.config.schema import DistributedSection, RunSection
from llmtrain.errors import UsageError


@dataclass(frozen=True)
class World:
    rank: int
    world_size: int
    device: torch.device


def find_world(distributed: DistributedSection, run: RunSection) -> World:
    """The world of this process. Without a launcher around it is alone, whatever the strategy."""
    given = os.environ.get("WORLD_SIZE") or str(distributed.world_size or 1)
    if not given.isdecimal():
        raise UsageError(f"WORLD_SIZE is {given!r}, which is no number.", remedy="Unset it, or set it to 1.")
    size = int(given)
    if size > 1:
        raise UsageError(
            f"A world of {size} processes was asked for, and this version trains in one.",
            remedy="Start one process: leave distributed.world_size empty and WORLD_SIZE unset.",
        )
    return World(rank=0, world_size=1, device=pick_device(run.device))


def pick_device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UsageError(
            "run.device is cuda, but this machine has no usable CUDA device.",
            remedy="Set run.device to auto or cpu, or check the driver with nvidia-smi.",
        )
    return torch.device("cuda" if name != "cpu" and available else "cpu")


def usable_cores() -> int:
    """Cores this process may use: its affinity, and in a container its CPU limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:  # noqa: PTH123
            quota, period = file.read().split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return cores
