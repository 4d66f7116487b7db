"""The state of a run: progress, and tensors by name. Names have no wrapper prefixes, so any strategy can load them."""

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import NoneType
from typing import Any

import torch
from torch import nn

from llmtrain.config.best_metric import VAL_LOSS, is_better
from llmtrain.distributed.parallel import unshard
from llmtrain.models.hf.causal_lm import CausalLM
from llmtrain.models.hf.lora import has_adapter

Tensors = dict[str, torch.Tensor]
_JSON_TYPES: dict[Any, tuple[type, ...]] = {  # JSON has one type of number
    int: (int,),
    int | None: (int, NoneType),
    float: (int, float),
    float | None: (int, float, NoneType),
    list[float]: (list,),
}


@dataclass
class TrainState:
    """Progress of a run: everything besides tensors that the loop carries from step to step."""

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
    """Complete passes over the training data."""
    epoch_loss_sum: float = 0.0
    epoch_steps: int = 0
    window_loss_sum: float = 0.0
    """Sum over the steps since the last logged training loss, so that a resumed run logs the same mean."""
    window_steps: int = 0
    first_val_loss: float | None = None
    last_score: float | None = None
    """trainer.best_metric at evaluated_step, unless that is the validation loss."""
    best_score: float | None = None
    last_bits_per_byte: float | None = None
    window_metric_sums: list[float] = field(default_factory=list)
    """The same as window_loss_sum, of the objective's metrics."""

    def note_evaluation(self, metrics: Mapping[str, float], best_metric: str) -> bool:
        """Record the evaluation of this step; returns whether it is the best so far. One without best_metric, such as
        an evaluation without tasks, is neither better nor worse."""
        if not self.evaluated_step:
            self.first_val_loss = metrics[VAL_LOSS]
        self.evaluated_step = self.step
        self.last_val_loss = metrics[VAL_LOSS]
        self.last_bits_per_byte = metrics.get("val/bits_per_byte", self.last_bits_per_byte)
        score = metrics.get(best_metric)
        best = self.best_val_loss if best_metric == VAL_LOSS else self.best_score
        self.last_score = None if best_metric == VAL_LOSS else score
        if score is None:
            return False
        if not is_better(best_metric, score, best):
            self.evaluations_since_best += 1
            return False
        self.best_val_loss = self.last_val_loss
        self.best_score = self.last_score
        self.best_step = self.step
        self.evaluations_since_best = 0
        return True

    def add_train_loss(self, loss: float, metrics: Sequence[float] = ()) -> None:
        self.epoch_loss_sum += loss
        self.epoch_steps += 1
        self.window_loss_sum += loss
        self.window_steps += 1
        before = self.window_metric_sums or [0.0] * len(metrics)
        self.window_metric_sums = [total + value for total, value in zip(before, metrics, strict=True)]

    def end_epoch(self) -> None:
        self.epoch_loss_sum = 0.0
        self.epoch_steps = 0

    def window_metrics(self) -> list[float]:
        """Means of the objective's metrics since the last end_window."""
        return [total / self.window_steps for total in self.window_metric_sums]

    def end_window(self) -> float:
        """The mean training loss since the last call; the next window starts here."""
        loss = self._window_loss()
        if self.first_train_loss is None:
            self.first_train_loss = loss
        self.last_train_loss = loss
        self.window_loss_sum = 0.0
        self.window_steps = 0
        self.window_metric_sums = []
        return loss if loss is not None else 0.0

    def _window_loss(self) -> float | None:
        if self.window_steps == 0:
            return self.last_train_loss
        return self.window_loss_sum / self.window_steps

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainState":
        """The inverse of as_dict, for values from a file; ValueError for anything else."""
        accepted = {each.name: _JSON_TYPES[each.type] for each in fields(cls)}
        for name, value in values.items():
            if name not in accepted:
                raise ValueError(f"unknown field {name[:40]}")
            if not _is_valid(value, accepted[name]):
                raise ValueError(f"{name} is {str(value)[:40]}")
        return cls(**values)

    def losses(self) -> dict[str, Any]:
        """The losses, under the names that the result of a run has for them. A training loss is the mean between two
        log lines; that of a run which stopped before its first log line is the mean of its steps."""
        window = self._window_loss()
        return {
            "first_train_loss": window if self.first_train_loss is None else self.first_train_loss,
            "final_train_loss": window if self.last_train_loss is None else self.last_train_loss,
            "first_val_loss": self.first_val_loss,
            "final_val_loss": self.last_val_loss,
            "final_bits_per_byte": self.last_bits_per_byte,
            "best_val_loss": self.best_val_loss,
            "best_step": self.best_step,
        }


def _is_valid(value: Any, types: tuple[type, ...]) -> bool:
    """Whether a value from JSON is of one of these types, and no number in it is NaN or infinite, which json reads."""
    if type(value) not in types:
        return False
    if isinstance(value, list):
        return all(_is_valid(each, (int, float)) for each in value)
    lowest = -sys.float_info.max if float in types else 0  # counts are not negative
    return value is None or bool(lowest <= value <= sys.float_info.max)


def model_tensors(module: nn.Module) -> Tensors:
    """Weights and buffers; of a model with adapters only those that are trained, because the base model is recorded by
    its hash. A tied matrix appears once."""
    state = module.state_dict(keep_vars=True)
    has_base = isinstance(module, CausalLM) and has_adapter(module)
    tensors: Tensors = {}
    included: set[int] = set()
    for name, tensor in state.items():
        if (has_base and not tensor.requires_grad) or id(tensor) in included:
            continue
        included.add(id(tensor))
        tensors[name] = tensor.detach()
    return tensors


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's state, named after its parameters. Settings such as the learning rate are not included: they
    follow from the config and the step.

    The names are those of torch.distributed.checkpoint, which takes seconds to import, in every start of a run."""
    return {
        f"state.{name}.{key}": value
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_tensors(
    module: nn.Module, optimizer: torch.optim.Optimizer, stored: set[str], read: Callable[[str, Tensors], None]
) -> None:
    """Load model and optimizer in place; `read` fills the tensors of a group (`model`, `optimizer`). `stored`: names of
    the optimizer's tensors in the checkpoint."""
    read("model", model_tensors(module))
    if not optimizer.state:  # Muon has it from the beginning
        _create_state(optimizer)
        _remove_missing_state(module, optimizer, stored)
    read("optimizer", optimizer_tensors(module, optimizer))


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """torch's optimizers create their state in the first step: this is one without gradients and learning rate."""
    learning_rates = []
    for group in optimizer.param_groups:
        learning_rates.append(group["lr"])
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, learning_rate in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = learning_rate


def _remove_missing_state(module: nn.Module, optimizer: torch.optim.Optimizer, stored: set[str]) -> None:
    """A parameter that had no gradient before the checkpoint was saved has no state in it. Its state starts with its
    first gradient, as in an uninterrupted run."""
    for name, parameter in module.named_parameters():
        state = optimizer.state.get(parameter, {})
        if not any(f"state.{name}.{key}" in stored for key in state):
            optimizer.state.pop(parameter, None)


def state_sha256(*groups: Tensors) -> str:
    """SHA-256 over all tensors, unsharded, in the order of their names. If they are sharded every rank must call this:
    tensors are gathered one at a time."""
    digest = hashlib.sha256()
    for group in groups:
        for name in sorted(group):
            tensor = unshard(group[name].detach()).cpu().contiguous()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
