"""The tensors of a run by name, and their hash. Names carry no wrapper prefixes, so they outlive a strategy."""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from types import NoneType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from llmtrain.distributed.parallel import whole

Tensors = dict[str, torch.Tensor]
_ACCEPTED: dict[Any, tuple[type, ...]] = {  # JSON has one kind of number
    int: (int,),
    int | None: (int, NoneType),
    float: (int, float),
    float | None: (int, float, NoneType),
}
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass
class TrainState:
    """How far the run is: everything besides tensors that the loop carries from step to step."""

    step: int = 0
    tokens: int = 0
    evaluated_step: int = 0
    first_train_loss: float | None = None
    last_train_loss: float | None = None
    last_val_loss: float | None = None
    best_val_loss: float | None = None
    best_step: int | None = None
    evaluations_since_best: int = 0
    epoch: int = 0
    """Whole passes over the training data so far."""
    epoch_loss_sum: float = 0.0
    epoch_steps: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainState":
        """What as_dict gave, read back from a file; ValueError for anything else."""
        accepted = {field.name: _ACCEPTED[field.type] for field in fields(cls)}
        for name, value in values.items():
            if name not in accepted:
                raise ValueError(f"{name[:40]} is not known")
            least = -sys.float_info.max if float in accepted[name] else 0
            if type(value) not in accepted[name] or (value is not None and not least <= value <= sys.float_info.max):
                raise ValueError(f"{name} is {str(value)[:40]}")
        return cls(**values)

    def losses(self) -> dict[str, Any]:
        """What a result tells of it."""
        return {
            "first_train_loss": self.first_train_loss,
            "final_train_loss": self.last_train_loss,
            "final_val_loss": self.last_val_loss,
            "best_val_loss": self.best_val_loss,
            "best_step": self.best_step,
        }


def model_tensors(module: nn.Module) -> Tensors:
    """What training changes. Frozen weights are another's, recorded by their hash; a tied matrix is there once."""
    state = module.state_dict(keep_vars=True)
    is_partly_frozen = not all(parameter.requires_grad for parameter in module.parameters())
    found: Tensors = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        if (is_partly_frozen and not tensor.requires_grad) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        found[name] = tensor.detach()
    return found


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's averages, named after their parameters. Settings such as the learning rate are not state
    here: they follow from the config and the step."""
    flat = cast(dict[str, Any], get_optimizer_state_dict(module, optimizer, options=_FLAT))
    return {name: value for name, value in flat.items() if name.startswith("state.")}


def load_tensors(module: nn.Module, optimizer: torch.optim.Optimizer, read: Callable[[str, Tensors], None]) -> None:
    """Put stored tensors into model and optimizer; `read` fills the tensors of a group (`model`, `optimizer`)."""
    read("model", model_tensors(module))  # into the weights themselves
    # Asking for it makes the averages, which are not there before the first step; settings are as they are now.
    flat = cast(dict[str, Any], get_optimizer_state_dict(module, optimizer, options=_FLAT))
    read("optimizer", {name: value for name, value in flat.items() if name.startswith("state.")})
    set_optimizer_state_dict(module, optimizer, flat, options=_FLAT)


def state_sha256(*groups: Tensors) -> str:
    """A hash over all tensors, whole, in the order of their names. Every rank has to take part where they are sharded:
    one tensor at a time is put together."""
    digest = hashlib.sha256()
    for group in groups:
        for name in sorted(group):
            tensor = whole(group[name].detach()).cpu().contiguous()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
