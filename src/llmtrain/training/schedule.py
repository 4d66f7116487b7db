"""Learning rate and momentum as functions of the step, and the length of a run in steps."""

import math
from enum import StrEnum

import torch

from llmtrain.config.trainer import TrainerSection
from llmtrain.core.logs import warn_once
from llmtrain.core.text import plural
from llmtrain.data.batches import TrainBatches
from llmtrain.errors import UsageError

FIRST_MOMENTUM = 0.85
FEW_STEPS = 20
_LONGER = "train for longer (trainer.max_epochs, trainer.max_steps), or lower trainer.grad_accum_steps"


class Group(StrEnum):
    """Which parameters a parameter group of the optimizer holds: its entry `group`."""

    ALL = "all"
    """All parameters (AdamW, Adafactor). The groups differ in their weight decay only."""
    MATRICES = "matrices"
    """Matrices of the transformer blocks, updated by Muon."""
    EMBEDDINGS = "embeddings"
    """Embeddings and the output layer."""
    VECTORS = "vectors"
    """Norm weights and biases."""


LR_RATIO = {Group.ALL: 1.0, Group.MATRICES: 1.0, Group.EMBEDDINGS: 0.6, Group.VECTORS: 0.3}
"""Learning rate of a group, relative to trainer.lr."""


def lr_at(step: int, config: TrainerSection) -> float:
    """Learning rate of a step. Steps are counted from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    end = config.schedule_steps or config.steps
    start = config.warmup_steps
    if config.schedule == "wsd":
        start = max(start, end - max(1, round(config.decay_fraction * end)))
    decayed = min(1.0, max(0.0, (step - start) / max(1, end - start)))
    factor = 1 - decayed
    if config.schedule == "cosine":
        factor = 0.5 * (1 + math.cos(math.pi * decayed))
    return config.min_lr + (config.lr - config.min_lr) * factor


def group_lr_at(step: int, group: Group, config: TrainerSection) -> float:
    """Learning rate of a parameter group in a step."""
    if group == Group.MATRICES and step < config.warmup_steps:
        # The size of an orthogonalized update does not depend on the gradient, so it needs no warmup.
        return config.lr
    return lr_at(step, config) * LR_RATIO[group]


def momentum_at(step: int, config: TrainerSection) -> float:
    """Muon's momentum in a step. Gradients change fast at first, so the average uses a shorter window early on."""
    assert config.momentum is not None
    assert config.momentum_warmup_steps is not None  # muon's defaults are filled in when a config is loaded
    start = min(FIRST_MOMENTUM, config.momentum)
    warmed_up = min(1.0, (step + 1) / max(1, config.momentum_warmup_steps))
    return start + (config.momentum - start) * warmed_up


def set_schedule(optimizer: torch.optim.Optimizer, step: int, config: TrainerSection) -> None:
    """Set what depends on the step: learning rates and muon's momentum."""
    for group in optimizer.param_groups:
        group["lr"] = group_lr_at(step, group["group"], config)
        if "momentum" in group:
            group["momentum"] = momentum_at(step, config)


def max_steps_of(trainer: TrainerSection, train_batches: TrainBatches) -> int | None:
    """trainer.max_steps, lowered to what trainer.max_epochs takes, now that the steps per epoch are known."""
    if trainer.max_epochs is None:
        return trainer.max_steps
    in_epochs = train_batches.steps_in(trainer.max_epochs)
    steps = min(trainer.max_steps or in_epochs, in_epochs)
    for _, problem in trainer.model_copy(update={"max_steps": steps}).problems():
        raise UsageError(problem)
    return steps


def warn_if_short(trainer: TrainerSection, is_smoke_test: bool) -> None:
    """Warn about a run that is too short to learn, which one for a smoke test need not."""
    if trainer.steps < trainer.warmup_steps:
        warn_once(
            "TRAIN",
            f"the run has {plural(trainer.steps, 'step')}, fewer than trainer.warmup_steps {trainer.warmup_steps}: it "
            f"ends before the learning rate reaches trainer.lr; {_LONGER}, or lower trainer.warmup_steps",
        )
    elif trainer.steps < FEW_STEPS and not is_smoke_test:
        warn_once("TRAIN", f"the run has {plural(trainer.steps, 'step')}, in which a model hardly learns; {_LONGER}")
