"""The precision that a model computes in, which depends on the config, the device and the numerics of the run."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from llmtrain.config.schema import Config
from llmtrain.config.trainer import BF16_ACTIVATIONS, TrainerSection
from llmtrain.models.base import ModelAdapter

Autocast = Callable[[], AbstractContextManager[None]]


def has_bf16(device: torch.device) -> bool:
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def compute_precision(trainer: TrainerSection, device: torch.device) -> str:
    """The precision this device computes in. A CPU without bfloat16 instructions emulates them, an order of magnitude
    slower than float32."""
    return trainer.precision if has_bf16(device) else "fp32"


def with_device_precision(config: Config, device: torch.device) -> Config:
    """The config with the precision this device computes in. Checkpoints record the config as given."""
    if has_bf16(device):
        return config
    return config.with_values("trainer", precision="fp32").with_values("model", dtype="float32")


def cast_dtype(trainer: TrainerSection, adapter: ModelAdapter, device: torch.device) -> torch.dtype | None:
    """The data type to which weights are cast where they are used; None: they are used as they are stored."""
    is_bf16 = compute_precision(trainer, device) in BF16_ACTIVATIONS
    if is_bf16 and adapter.numerics.casts_weights and adapter.can_cast_weights:
        return torch.bfloat16
    return None


def autocast_for(trainer: TrainerSection, adapter: ModelAdapter, device: torch.device) -> Autocast:
    """The context of every forward pass: autocast for a bf16 model whose weights are not cast."""
    is_bf16 = compute_precision(trainer, device) in BF16_ACTIVATIONS
    if not is_bf16 or cast_dtype(trainer, adapter, device):
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
