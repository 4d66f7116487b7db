"""The precision that a device can compute in."""

import torch

from llmtrain.config.schema import Config


def with_device_precision(config: Config, device: torch.device) -> Config:
    """The config with the precision this device computes in. A CPU without bfloat16 instructions emulates them, an
    order of magnitude slower than float32. Checkpoints record the config as given."""
    if has_bf16(device):
        return config
    return config.with_values("trainer", precision="fp32").with_values("model", dtype="float32")


def has_bf16(device: torch.device) -> bool:
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
