"""For which device a model chooses its kernels: that of its tensors, or that of a plan.

`llmtrain plan` traces a step of a GPU on fake tensors of the CPU, because torch's CPU build has no fake CUDA tensors.
What is decided by a tensor's device must then be decided as on the GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_planned: str | None = None


def device_type(tensor: torch.Tensor) -> str:
    """`cpu` or `cuda`."""
    return _planned or tensor.device.type


def is_gpu(tensor: torch.Tensor) -> bool:
    return device_type(tensor) == "cuda"


def is_planned() -> bool:
    """Whether tensors have shapes but no values, so that nothing may depend on the values."""
    return _planned is not None


@contextmanager
def planned_for(target: str) -> Iterator[None]:
    """Decide as on this type of device."""
    global _planned
    _planned = target
    try:
        yield
    finally:
        _planned = None
