"""The optimizer of a run, with the parameter groups that schedule.py sets the learning rates of."""

from typing import Any

import torch
from torch import nn

from llmtrain.config.trainer import TrainerSection
from llmtrain.distributed.world import World
from llmtrain.models.base import ModelAdapter, block_matrices
from llmtrain.training.muon import Muon
from llmtrain.training.newton_schulz import has_kernel
from llmtrain.training.schedule import LR_RATIO, Group


def build_optimizer(
    adapter: ModelAdapter, module: nn.Module, config: TrainerSection, world: World, is_reproducible: bool = False
) -> torch.optim.Optimizer:
    """An optimizer over all trainable parameters. Weight decay applies to matrices, not to biases and norms.
    `is_reproducible`: distributed.reproducible_reduce."""
    if config.optimizer != "muon":
        return build_adamw(module, config)
    # Bits that do not depend on the number of processes must not depend on how matrices are batched either.
    is_batched = world.device.type != "cpu" and not is_reproducible
    return build_muon(adapter, module, config, world, is_batched)


def build_adamw(module: nn.Module, config: TrainerSection) -> torch.optim.Optimizer:
    """AdamW or Adafactor."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices, vectors = _by_dimension(parameters)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "group": Group.ALL, "weight_decay": config.weight_decay},
        {"params": vectors, "group": Group.ALL, "weight_decay": 0.0},
    ]
    used = [group for group in groups if group["params"]]
    if config.optimizer == "adafactor":
        return torch.optim.Adafactor(used, lr=config.lr)
    return torch.optim.AdamW(used, lr=config.lr, betas=config.betas, fused=True)


def build_muon(adapter: ModelAdapter, module: nn.Module, config: TrainerSection, world: World, batched: bool) -> Muon:
    """Muon for the matrices of the blocks, AdamW for the other parameters."""
    matrices = block_matrices(adapter, module)
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    embeddings, vectors = _by_dimension([parameter for name, parameter in trained if name not in matrices])
    # `fused` makes torch keep `step` on the device when a state is loaded.
    adamw = {"betas": config.betas, "fused": True}
    groups: list[dict[str, Any]] = [
        {
            "params": list(matrices.values()),
            "group": Group.MATRICES,
            "weight_decay": config.weight_decay,
            "momentum": config.momentum,
        },
        {"params": embeddings, "group": Group.EMBEDDINGS, "weight_decay": config.weight_decay, **adamw},
        {"params": vectors, "group": Group.VECTORS, "weight_decay": 0.0, **adamw},
    ]
    for group in groups:
        group["lr"] = config.lr * LR_RATIO[group["group"]]
    fused = adapter.matrix_sections(module)
    sections = [fused.get(name, []) for name in matrices]
    used = [group for group in groups if group["params"]]
    uses_kernel = adapter.numerics.has_muon_kernel and config.compile and has_kernel(world.device)
    return Muon(used, sections, world.rank, world.world_size, batched, uses_kernel)


def _by_dimension(parameters: list[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices and embeddings, which decay; and vectors, which do not."""
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    return matrices, vectors
