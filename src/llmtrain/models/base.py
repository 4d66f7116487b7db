"""What the trainer asks of a model family. Add a row to registry.MODELS and it can be named in a config."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.config.schema import ModelSection
from llmtrain.errors import UsageError


class ModelAdapter(ABC):
    """Builds a module that maps token ids (B, T) to logits (B, T, vocab_size), and knows a few things about it.
    There may be more columns than vocab_size, as long as they are -inf."""

    def __init__(self, config: ModelSection, tokenizer_vocab: int) -> None:
        self.config = config
        self.vocab_size = config.vocab_size or tokenizer_vocab
        if self.vocab_size < tokenizer_vocab:
            raise UsageError(
                f"model.vocab_size {self.vocab_size} is smaller than the tokenizer's vocabulary of {tokenizer_vocab}.",
                remedy="Leave model.vocab_size empty to take the tokenizer's.",
            )

    @abstractmethod
    def build(self) -> nn.Module:
        """A new module on the CPU, initialised from torch's global generator (the caller seeds it)."""

    def loss(self, module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum of the cross-entropy over all targets that count. A sum, because what it is divided by, the target
        tokens of a whole step, is known to the trainer only."""
        logits = module(inputs)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1), reduction="sum")

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """The repeated parts of the module, which are sharded and compiled one by one."""
        return [block for part in module.modules() if isinstance(part, nn.ModuleList) for block in part]

    @abstractmethod
    def flops_per_token(self, module: nn.Module) -> float:
        """Floating-point operations of forward and backward for one token."""

    def export(self, module: nn.Module, folder: Path, end_of_text: int | None = None) -> None:  # noqa: ARG002
        """Write the weights in a format that other programs load; `end_of_text` is the token to stop at."""
        raise UsageError(f"Model '{self.config.name}' has no export format.")


def parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
