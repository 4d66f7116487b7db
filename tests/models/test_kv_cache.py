"""Generation with a KV cache gives what recomputing the whole context gives."""

from typing import Any

import pytest
import rank_harness as ranks
import torch
from torch import nn

from llmtrain.config.distributed import DistributedSection
from llmtrain.config.model import GptSection, ModernGptSection
from llmtrain.distributed.parallel import parallelize
from llmtrain.distributed.world import World
from llmtrain.models.base import ModelAdapter
from llmtrain.models.gpt.adapter import GPTAdapter

BLOCK = 16
MODELS: dict[str, Any] = {
    "gpt2": GptSection(block_size=BLOCK, d_model=32, n_layers=2, n_heads=4, vocab_size=101),
    "swiglu": ModernGptSection(block_size=BLOCK, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=101),
    "relu2": ModernGptSection(block_size=BLOCK, d_model=32, n_layers=2, n_heads=4, mlp="relu2", vocab_size=101),
}
IDS = torch.randint(0, 101, (BLOCK + 5,), generator=torch.Generator().manual_seed(1)).tolist()
LENGTHS = [3, 4, 5, 9, 10, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 5]  # the context grows by one, by several, and is full


def build(name: str) -> tuple[GPTAdapter, nn.Module]:
    torch.manual_seed(0)
    adapter = GPTAdapter(MODELS[name], 101)
    module = adapter.build().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return adapter, module


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_equal_those_of_the_whole_context(name: str) -> None:
    adapter, module = build(name)
    cached, whole = adapter.next_logits(module, BLOCK), ModelAdapter.next_logits(adapter, module, BLOCK)
    for length in LENGTHS:
        torch.testing.assert_close(cached(IDS[:length]), whole(IDS[:length]), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_each_token_is_computed_once() -> None:
    adapter, module = build("gpt2")
    lengths: list[int] = []
    module.wte.register_forward_hook(lambda _, args, __: lengths.append(args[0].shape[1]))  # type: ignore[operator, union-attr]
    next_logits = adapter.next_logits(module, BLOCK)
    for length in LENGTHS:
        next_logits(IDS[:length])
    assert lengths == [3, 1, 1, 4, 1, 5, 1, BLOCK, BLOCK]


def test_sharded_model_generates_the_same() -> None:
    def logits(world: World) -> list[torch.Tensor]:
        adapter, module = build("swiglu")
        section = DistributedSection(strategy="fsdp")
        parallelize(module, adapter.blocks, section, world, "fp32", 2)
        next_logits = adapter.next_logits(module, BLOCK)
        with torch.no_grad():
            return [next_logits(IDS[:length]) for length in LENGTHS]

    adapter, module = build("swiglu")
    with torch.no_grad():
        next_logits = adapter.next_logits(module, BLOCK)
        expected = [next_logits(IDS[:length]) for length in LENGTHS]
    for actual in ranks.values(ranks.run_ranks(2, logits)):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
