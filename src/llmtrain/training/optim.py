"""Learning rate as a function of the step, and the optimizer."""

import math

import torch
from torch import nn

from llmtrain.config.trainer import TrainerSection

FIRST_MOMENTUM = 0.85


def lr_at(step: int, config: TrainerSection) -> float:
    """Learning rate of a step; the first step is 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    end = config.schedule_steps or config.steps
    start = config.warmup_steps
    if config.schedule == "wsd":
        start = max(start, end - max(1, round(config.decay_fraction * end)))
    decayed = min(1.0, max(0.0, (step - start) / max(1, end - start)))
    factor = 0.5 * (1 + math.cos(math.pi * decayed)) if config.schedule == "cosine" else 1 - decayed
    return config.min_lr + (config.lr - config.min_lr) * factor


def build_optimizer(module: nn.Module, config: TrainerSection) -> torch.optim.Optimizer:
    """AdamW or Adafactor over all trainable parameters. Weight decay applies to matrices, not to biases and norms."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=config.lr)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def set_schedule(optimizer: torch.optim.Optimizer, step: int, lr: float) -> None:
    """Set what depends on the step: learning rates and muon's momentum."""
    for group in optimizer.param_groups:
        is_warm = step < group.get("steps_at_peak", 0)
        group["lr"] = group["peak_lr"] if is_warm else lr * group.get("lr_ratio", 1.0)
        if "momentum" in group:
            group["momentum"] = momentum_at(step, group["peak_momentum"], group["momentum_warmup_steps"])


def momentum_at(step: int, peak: float, warmup_steps: int) -> float:
    """Muon's momentum in a step. Gradients change fast at first, and their average should forget as fast."""
    start = min(FIRST_MOMENTUM, peak)
    return start + (peak - start) * min(1.0, (step + 1) / max(1, warmup_steps))
