"""A small GPT whose weights are all random: as it is built, its output projections are zero, and so is what it says."""

from typing import Any

import torch

from llmtrain.config.model import GptSection, ModernGptSection
from llmtrain.models.gpt.adapter import GPTAdapter

VOCABULARY = 101


def random_gpt(section: GptSection | ModernGptSection) -> tuple[GPTAdapter, Any]:
    torch.manual_seed(0)
    adapter = GPTAdapter(section, VOCABULARY)
    module = adapter.build().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return adapter, module
