"""The precision that a model computes in, which depends on the config, the device and the numerics of the run."""

from contextlib import nullcontext

import torch

from llmtrain.config.schema import Config
from llmtrain.models.base import ModelAdapter
from llmtrain.training.model import Autocast


def with_device_precision(config: Config, device: torch.device) -> Config:
    """The config with the precision this device computes in. A CPU without bfloat16 instructions emulates them, an
    order of magnitude slower than float32. Checkpoints record the config as given."""
    if has_bf16(device):
        return config
    return config.with_values("trainer", precision="fp32").with_values("model", dtype="float32")


def has_bf16(device: torch.device) -> bool:
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


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
