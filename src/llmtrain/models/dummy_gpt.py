"""`dummy_gpt`: predicts a token from the one before it. Everything around a model can be tried with it in seconds."""

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.config.model import DummyGptSection
from llmtrain.models.base import ModelAdapter, parameter_count


class DummyGPT(nn.Module):
    def __init__(self, config: DummyGptSection, vocab_size: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.embedding = nn.Embedding(vocab_size, config.d_model)
        self.head = nn.Linear(config.d_model, vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(F.dropout(self.embedding(tokens), self.dropout, self.training))
        return logits


class DummyGPTAdapter(ModelAdapter):
    config: DummyGptSection

    def build(self) -> nn.Module:
        return DummyGPT(self.config, self.vocab_size)

    def flops_per_token(self, module: nn.Module) -> float:
        return 6.0 * parameter_count(module)
