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
from llmtrain.training.text_generation import Sampling, sample_ids
from random_gpt import random_gpt

BLOCK = 16
MLPS: tuple[Any, ...] = ("swiglu", "relu2")
MODELS: dict[str, Any] = {
    "gpt2": GptSection(block_size=BLOCK, d_model=32, n_layers=2, n_heads=4, vocab_size=101),
    **{
        f"{mlp}-{kv_heads}-{'tied' if is_tied else 'untied'}": ModernGptSection(
            block_size=BLOCK,
            d_model=32,
            n_layers=2,
            n_heads=4,
            n_kv_heads=kv_heads,
            mlp=mlp,
            tie_embeddings=is_tied,
            vocab_size=101,
        )
        for mlp in MLPS
        for kv_heads in (1, 2, 4)
        for is_tied in (True, False)
    },
}
IDS = torch.randint(0, 101, (BLOCK + 5,), generator=torch.Generator().manual_seed(1)).tolist()
LENGTHS = [3, 4, 5, 9, 10, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 5]  # the context grows by one, by several, and is full


def build(name: str) -> tuple[GPTAdapter, nn.Module]:
    return random_gpt(MODELS[name])


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_equal_those_of_the_whole_context(name: str) -> None:
    adapter, module = build(name)
    cached, whole = adapter.next_logits(module, BLOCK), ModelAdapter.next_logits(adapter, module, BLOCK)
    for length in LENGTHS:
        torch.testing.assert_close(cached(IDS[:length]), whole(IDS[:length]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, BLOCK - 2, BLOCK, BLOCK + 5])
@pytest.mark.parametrize("name", ["gpt2", "swiglu-2-untied", "relu2-1-tied"])
def test_samples_equal_those_of_the_whole_context(name: str, length: int) -> None:
    """Also of a prompt that fills the context or is longer, and when the text outgrows it."""
    adapter, module = build(name)

    class Uncached(GPTAdapter):
        next_logits = ModelAdapter.next_logits

    whole = Uncached(MODELS[name], 101)
    for sampling in (
        Sampling(BLOCK + 4, temperature=0.0),
        Sampling(BLOCK + 4, temperature=0.8, top_k=20, seed=3),
        Sampling(BLOCK + 4, temperature=1.3, top_p=0.7, seed=4),
    ):
        found = sample_ids(adapter, module, IDS[:length], sampling, BLOCK)
        assert len(found) == BLOCK + 4
        assert found == sample_ids(whole, module, IDS[:length], sampling, BLOCK)


@torch.no_grad()
def test_each_token_is_computed_once() -> None:
    adapter, module = build("gpt2")
    lengths: list[int] = []
    module.wte.register_forward_hook(lambda _, args, __: lengths.append(args[0].shape[1]))  # type: ignore[operator, union-attr]
    next_logits = adapter.next_logits(module, BLOCK)
    for length in LENGTHS:
        next_logits(IDS[:length])
    assert lengths == [3, 1, 1, 4, 1, 5, 1, BLOCK, BLOCK]


@pytest.mark.slow
def test_sharded_model_generates_the_same() -> None:
    def logits(world: World) -> list[torch.Tensor]:
        adapter, module = build("swiglu-2-tied")
        section = DistributedSection(strategy="fsdp")
        parallelize(module, adapter.blocks, section, world, "fp32", 2)
        next_logits = adapter.next_logits(module, BLOCK)
        with torch.no_grad():
            return [next_logits(IDS[:length]) for length in LENGTHS]

    adapter, module = build("swiglu-2-tied")
    with torch.no_grad():
        next_logits = adapter.next_logits(module, BLOCK)
        expected = [next_logits(IDS[:length]) for length in LENGTHS]
    for actual in ranks.values(ranks.run_ranks(2, logits)):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
