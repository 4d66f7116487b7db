"""The target of a plan, from options, the config and this machine."""

import math
import re
from importlib.util import find_spec

from llmtrain.config.schema import Config
from llmtrain.core.gpus import find_gpu, gpu_of_device
from llmtrain.distributed.machine_limits import machine_memory
from llmtrain.errors import UsageError
from llmtrain.plan.launch_target import gpu_of_launch
from llmtrain.plan.target import Target

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}


def choose_target(
    config: Config,
    nodes: int | None = None,
    processes_per_node: int | None = None,
    gpu: str | None = None,
    memory: str | None = None,
) -> Target:
    """--gpu or --memory name a GPU. Otherwise it is what the config asks for: run.device and, where launch.resources
    has GPUs, the GPU that launch.node_selector names; with run.device auto, this machine's."""
    size = None if memory is None else parse_size(memory)
    count = nodes or config.launch.node_range[1]
    processes = processes_per_node or config.launch.processes_per_node
    if gpu is not None:
        found = find_gpu(gpu)
        return Target("cuda", size or found.memory_bytes, found, count, processes)
    if config.run.device == "cpu":
        return Target("cpu", size or machine_memory(), None, count, processes)
    if size is not None:
        return Target("cuda", size, None, count, processes)
    return _of_this_machine(config, count, processes)


def _of_this_machine(config: Config, nodes: int, processes: int) -> Target:
    if find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(0)
            return Target("cuda", properties.total_memory, gpu_of_device(properties.name), nodes, processes)
    if config.run.device == "cuda" or config.launch.resources.gpus:
        gpu = gpu_of_launch(config.launch)
        return Target("cuda", gpu.memory_bytes if gpu else None, gpu, nodes, processes)
    return Target("cpu", machine_memory(), None, nodes, processes)


def parse_size(text: str) -> int:
    """`24GB`, `80 GiB`, `80Gi`"""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    units = _UNITS | _BINARY_UNITS
    size = 0
    if match and match[2] in units:
        number = float(match[1]) * units[match[2]]
        size = int(number) if math.isfinite(number) else 0
    if size <= 0:
        raise UsageError(f"--memory must be a size above 0 such as 24GB or 80GiB, got {text!r}.")
    return size
