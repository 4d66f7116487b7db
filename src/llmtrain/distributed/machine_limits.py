"""What this machine or container has: GPUs, cores, memory, and how many threads each worker process gets."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from llmtrain.config.run import MAX_THREADS
from llmtrain.core.env import SHARED_CORES

# The memory limit of this container, with version 2 and 1 of control groups.
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
# Where the driver lists the GPUs of this machine or container; the first that exists is used.
GPU_LISTS = (("/proc/driver/nvidia/gpus", "*"), ("/dev", "nvidia[0-9]*"))


def gpu_count(environ: Mapping[str, str]) -> int:
    """GPUs that CUDA would show to a process, without loading CUDA, which takes time and GPU memory."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        for directory, pattern in GPU_LISTS:
            count = len(list(Path(directory).glob(pattern)))
            if count:
                return count
        return 0
    count = 0
    for entry in visible.split(","):
        if not re.fullmatch(r"\d+|(GPU|MIG)-.+", entry.strip()):
            break  # CUDA ignores the first invalid entry and all after it
        count += 1
    return count


def usable_cores() -> int:
    """Cores that this process may use, from its CPU affinity and the CPU limit of its container."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS
        cores = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return cores


def machine_memory() -> int:
    """Bytes of memory of this machine, or of its container if that has less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # no such file, or `max`
            continue
    return min(limit for limit in limits if limit > 0)  # sysconf returns -1 for what it does not know


def omp_threads(environment: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS as set by the user (the first number of a list); None where llmtrain set it, or if invalid."""
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if SHARED_CORES in environment or not re.fullmatch("[0-9]{1,6}", first):
        return None
    if not 0 < int(first) <= MAX_THREADS:
        return None
    return int(first)


def thread_variables(processes: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that divide the cores among the worker processes of a node: by default each of them would
    use all cores. Empty where the user has set OMP_NUM_THREADS."""
    if processes == 1 or "OMP_NUM_THREADS" in environment:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, usable_cores() // processes)), SHARED_CORES: "1"}
