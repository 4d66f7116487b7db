"""GPUs by name: memory and peak speed, from the vendors' data sheets."""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from llmtrain.core.text import format_bytes
from llmtrain.errors import UsageError

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    name: str
    """As in `plan --gpu`."""
    pattern: str
    """Found in the device name that CUDA reports."""
    memory_bytes: int
    """What CUDA reports as the total memory: less than the number in the name."""
    bf16_flops: float
    """Dense peak in FLOP/s; float16 where there is no bfloat16."""
    fp32_flops: float
    """Peak without tensor cores."""
    has_bf16: bool = True


# The first that matches a device name counts: longer names come before those that they contain.
GPUS = (
    Gpu("gb200-186g", r"\bGB200\b", int(184.0 * GIB), 2250e12, 80e12),
    Gpu("b200-180g", r"\bB200\b", int(178.3 * GIB), 2250e12, 75e12),
    Gpu("gh200-96g", r"\bGH200\b", int(94.5 * GIB), 989e12, 67e12),
    Gpu("h200-141g", r"\bH200\b", int(139.8 * GIB), 989e12, 67e12),
    Gpu("h100-94g", r"\bH100 NVL\b", int(93.1 * GIB), 835e12, 60e12),
    Gpu("h100-80g", r"\bH100\b", int(79.1 * GIB), 989e12, 67e12),
    Gpu("a100-40g", r"\bA100.*\b40GB", int(39.4 * GIB), 312e12, 19.5e12),
    Gpu("a100-80g", r"\bA100\b", int(79.2 * GIB), 312e12, 19.5e12),
    Gpu("l40s-48g", r"\bL40S\b", int(44.4 * GIB), 362e12, 91.6e12),
    Gpu("l40-48g", r"\bL40\b", int(44.4 * GIB), 181e12, 90.5e12),
    Gpu("a6000-48g", r"\bRTX A6000\b", int(47.4 * GIB), 155e12, 38.7e12),
    Gpu("rtx5090-32g", r"\bRTX 5090\b", int(31.4 * GIB), 209e12, 104.8e12),
    Gpu("rtx4090-24g", r"\bRTX 4090\b", int(23.5 * GIB), 165e12, 82.6e12),
    Gpu("rtx3090-24g", r"\bRTX 3090\b", int(23.6 * GIB), 71e12, 35.6e12),
    Gpu("l4-24g", r"\bL4\b", int(22.0 * GIB), 121e12, 30.3e12),
    Gpu("a10-24g", r"\bA10G?\b", int(22.0 * GIB), 125e12, 31.2e12),
    Gpu("t4-16g", r"\bT4\b", int(14.6 * GIB), 65e12, 8.1e12, has_bf16=False),
)


def gpu_of_device(name: str) -> Gpu | None:
    """The GPU with this device name, such as `NVIDIA H100 80GB HBM3`; None if it is not in the table."""
    return next((gpu for gpu in GPUS if re.search(gpu.pattern, name)), None)


def gpus_named(name: str) -> list[Gpu]:
    """The GPUs with the name that a user writes: `h100-80g`, or `h100` for all of that name."""
    wanted = _normalized(name)
    return [gpu for gpu in GPUS if wanted in (gpu.name, gpu.name.partition("-")[0])]


def near_names(name: str) -> list[str]:
    """What a name that is not known, or that several GPUs have, may mean."""
    found = [gpu.name for gpu in gpus_named(name)]
    return found or get_close_matches(_normalized(name), [gpu.name for gpu in GPUS], 2)


def _normalized(name: str) -> str:
    return name.strip().lower().removeprefix("nvidia-").replace("_", "-").removesuffix("b")


def find_gpu(name: str) -> Gpu:
    """The GPU that a user names: `h100-80g`, or `h100` if there is only one of that name."""
    found = gpus_named(name)
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{gpu.name} ({format_bytes(gpu.memory_bytes)})" for gpu in GPUS)
    near = near_names(name)
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UsageError(
        f"--gpu {name} is not known.{meant}",
        remedy=f"Choose one of {known}; or give its memory with --memory 24GB, without an estimate of the time.",
    )
