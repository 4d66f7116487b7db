"""`dummy_gpt`: predicts a token from the previous one. Trains in seconds, for smoke tests."""

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.config.schema import ModelSection
from llmtrain.errors import UsageError
from llmtrain.models.base import ModelAdapter, parameter_count


class DummyGPT(nn.Module):
    def __init__(self, config: ModelSection, vocab_size: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.embedding = nn.Embedding(vocab_size, config.d_model)
        self.head = nn.Linear(config.d_model, vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (B, T) -> (B, T, V)
        logits: torch.Tensor = self.head(F.dropout(self.embedding(tokens), self.dropout, self.training))
        return logits


class DummyGPTAdapter(ModelAdapter):
    def build(self) -> nn.Module:
        if self.config.init != "random":
            raise UsageError(
                f"model.init must be random for dummy_gpt, got '{self.config.init}'.",
                remedy="Set model.init to random.",
            )
        return DummyGPT(self.config, self.vocab_size)

    def flops_per_token(self, module: nn.Module) -> float:
        return 6.0 * parameter_count(module)
