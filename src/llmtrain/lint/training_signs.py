"""Signs that a container trains a model, and that it does so together with other pods. Other people's manifests do not
say so: their variables, flags, programs and images do."""

import re

from llmtrain.lint.container_command import Container

# Variables of distributed training. RANK is not one of them: many programs have ranks.
RENDEZVOUS_VARIABLES = (
    "MASTER_ADDR",
    "PET_MASTER_ADDR",
    "PET_RDZV_ENDPOINT",
    "RDZV_ENDPOINT",
    "PET_NNODES",
    "NNODES",
    "WORLD_SIZE",
)
RENDEZVOUS_FLAGS = (
    "rdzv-endpoint",
    "rdzv-backend",
    "master-addr",
    "nnodes",
    "main-process-ip",
    "num-machines",
    "hostfile",
)
RUN_LABEL = "llmtrain.dev/run"
_TRAINING = re.compile(
    r"\btrain(?:ing|er)?\b|\btrain\w*\.py\b|_train\.py\b|\bfine_?tun\w*|\bpretrain\w*", re.IGNORECASE
)
_PROGRAM = re.compile(
    r"\b\w{0,60}(?:train|fine_?tun)\w{0,60}\.py\b|\bllmtrain\s+(?:train|node)\b|\s-m\s+(?!llmtrain\b)[\w.]{0,60}train",
    re.IGNORECASE,
)
_IMAGES = re.compile(r"pytorch|torch|deepspeed|llmtrain|nemo", re.IGNORECASE)


def has_rendezvous(container: Container) -> bool:
    """Whether its processes connect to those of other pods."""
    if "standalone" in container.flags:  # torchrun in one pod
        return False
    for name in RENDEZVOUS_VARIABLES:
        if name in container.variables:
            return True
    return any(name in container.flags for name in RENDEZVOUS_FLAGS)


def seems_to_train(container: Container) -> bool:
    if "llmtrain guard" in container.command_line:  # our image, but it trains nothing
        return False
    if container.gpus or container.is_torchrun or _TRAINING.search(container.command_line):
        return True
    return _IMAGES.search(container.node.get("image").text) is not None


def runs_training_program(container: Container) -> bool:
    """Whether it runs a program named after training. Stricter than seems_to_train: a server may need GPUs too."""
    return _PROGRAM.search(container.command_line) is not None
