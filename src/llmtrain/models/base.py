"""What the trainer asks of a model family. Add a row to registry.MODELS and it can be named in a config."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.config.model import ModelSection
from llmtrain.errors import UsageError

LossFunction = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
NextLogits = Callable[[Sequence[int]], torch.Tensor]
"""Logits of the token that follows; called with the ids so far, one or more longer each time."""
WriteInto = Callable[[Path], None]


class ModelAdapter(ABC):
    """Builds a module that maps token ids (B, T) to logits (B, T, vocab_size), and knows a few things about it.
    There may be more columns than vocab_size, as long as they are -inf."""

    can_pack = False
    """Whether the loss takes `positions`, which start anew with each of several rows in one sequence."""

    def __init__(self, config: ModelSection, tokenizer_vocab: int) -> None:
        self.config = config
        self.vocab_size: int = getattr(config, "vocab_size", None) or tokenizer_vocab
        if self.vocab_size < tokenizer_vocab:
            raise UsageError(
                f"model.vocab_size {self.vocab_size} is smaller than the tokenizer's vocabulary of {tokenizer_vocab}.",
                remedy="Leave model.vocab_size out to use the tokenizer's.",
            )

    @classmethod
    def own_tokenizer(cls, config: Any) -> str:  # noqa: ARG003
        """What data.tokenizer means where it is empty."""
        return "byte"

    @abstractmethod
    def build(self) -> nn.Module:
        """A new module on the CPU, initialised from torch's global generator (the caller seeds it)."""

    def build_empty(self) -> nn.Module:
        """The same module with any weights: a checkpoint's are put in, or it is only counted."""
        return self.build()

    def base_files(self) -> list[Path]:
        """Files of a model that is built upon and not stored in checkpoints; they decide the result."""
        return []

    @property
    def uses_dropout(self) -> bool:
        return bool(getattr(self.config, "dropout", 0.0))

    def loss(
        self, module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum of the cross-entropy over all targets that count. A sum, because what it is divided by, the target
        tokens of a whole step, is known to the trainer only."""
        assert positions is None or self.can_pack
        logits = module(inputs)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1), reduction="sum")

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """The repeated parts of the module, which are sharded and compiled one by one."""
        return [block for part in module.modules() if isinstance(part, nn.ModuleList) for block in part]

    def examine(self, module: nn.Module) -> None:  # noqa: B027 (most have nothing to find out)
        """Find out about the finished model what can only be tried."""

    def context_length(self) -> int:
        """Most tokens the model can look back on when it writes."""
        return self.config.block_size

    def end_ids(self) -> set[int]:
        """Tokens that end an answer, besides the tokenizer's own."""
        return set()

    def config_files(self) -> list[Path]:
        """Files that are needed to build the module, besides its weights."""
        return []

    def keeps_rows_apart(self, module: nn.Module) -> bool:  # noqa: ARG002
        """Whether such rows are really kept apart by this very model."""
        return self.can_pack

    def compiled(self, module: nn.Module, by_block: bool) -> LossFunction:
        """The loss, compiled; `by_block` where what is between the blocks cannot be (it gathers sharded weights)."""
        if not by_block:
            return torch.compile(self.loss)
        for block in self.blocks(module):
            block.compile()
        return self.loss

    def next_logits(self, module: nn.Module, block_size: int) -> NextLogits:
        """For writing text. This one looks at the whole context again for each token."""

        def following(ids: Sequence[int]) -> torch.Tensor:
            device = next(module.parameters()).device
            logits: torch.Tensor = module(torch.tensor([ids[-block_size:]], device=device))
            return logits[0, -1]

        return following

    def companion(self, module: nn.Module) -> WriteInto | None:  # noqa: ARG002
        """What a checkpoint holds besides: a function that writes it into the checkpoint's directory. All ranks call
        this at once, rank 0 then writes, perhaps in the background."""
        return None

    @abstractmethod
    def flops_per_token(self, module: nn.Module) -> float:
        """Floating-point operations of forward and backward for one token."""

    def export(
        self,
        module: nn.Module,  # noqa: ARG002
        folder: Path,  # noqa: ARG002
        end_of_text: int | None = None,  # noqa: ARG002
        dtype: str = "float32",  # noqa: ARG002
    ) -> None:
        """Write the weights in a format that other programs load; `end_of_text` is the token to stop at."""
        raise UsageError(f"Model '{self.config.name}' has no export format.")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module without dropout for a while, then as it was."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


def parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def trainable_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
