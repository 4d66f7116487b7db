"""The precision that a model computes in, which depends on the config, the device and the numerics of the run."""

from contextlib import nullcontext

import torch

from llmtrain.config.schema import Config
from llmtrain.models.base import ModelAdapter
from llmtrain.models.device_precision import with_device_precision
from llmtrain.training.model import Autocast


def computes_in_bf16(config: Config, device: torch.device) -> bool:
    return with_device_precision(config, device).trainer.precision == "bf16"


def cast_dtype(config: Config, adapter: ModelAdapter, device: torch.device) -> torch.dtype | None:
    """The data type to which weights are cast where they are used; None: they are used as they are stored."""
    is_cast = adapter.numerics.casts_weights and adapter.can_cast_weights and computes_in_bf16(config, device)
    return torch.bfloat16 if is_cast else None


def autocast_for(config: Config, adapter: ModelAdapter, device: torch.device) -> Autocast:
    """The context of every forward pass: autocast for a bf16 model whose weights are not cast."""
    if not computes_in_bf16(config, device) or cast_dtype(config, adapter, device):
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
