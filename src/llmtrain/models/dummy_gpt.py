"""`dummy_gpt`: predicts a token from the previous one. Trains in seconds, for smoke tests."""

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.config.model import DummyGptSection
from llmtrain.models.base import ModelAdapter


class DummyGPT(nn.Module):
    def __init__(self, config: DummyGptSection, vocab_size: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.embedding = nn.Embedding(vocab_size, config.d_model)
        self.head = nn.Linear(config.d_model, vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (B, T) -> (B, T, V)
        return self.head(F.dropout(self.embedding(tokens), self.dropout, self.training))


class DummyGPTAdapter(ModelAdapter):
    config: DummyGptSection
    can_cast_weights = True

    def build(self) -> nn.Module:
        return DummyGPT(self.config, self.vocab_size)
