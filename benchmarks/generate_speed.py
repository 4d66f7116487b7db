"""Tokens per second of generation with the KV cache, compared with recomputing the whole context for each token.

    python benchmarks/generate_speed.py [--architecture gpt2 --size 124m --tokens 256 --device cuda]

Both sides generate the same number of tokens after the same prompt, greedily, with a model of random weights in this
process. Prints every round and the median of the ratios.
"""

import argparse
import statistics
import time

import torch

from llmtrain.config.model import GptSection, ModernGptSection
from llmtrain.config.sizes import SIZES, default_heads
from llmtrain.models.base import ModelAdapter
from llmtrain.models.gpt.adapter import GPTAdapter
from llmtrain.training.text_generation import Sampling, sample_ids

PROMPT = list(range(1, 17))


class Recomputing(GPTAdapter):
    """Without the cache."""

    next_logits = ModelAdapter.next_logits


def make_config(arguments: argparse.Namespace) -> GptSection | ModernGptSection:
    layers, width = SIZES.get(arguments.size, (4, 128))
    if arguments.architecture == "modern":
        return ModernGptSection(n_layers=layers, d_model=width, block_size=arguments.context)
    return GptSection(n_layers=layers, d_model=width, n_heads=default_heads(width), block_size=arguments.context)


def tokens_per_second(adapter: GPTAdapter, module: torch.nn.Module, count: int) -> float:
    started = time.perf_counter()
    ids = sample_ids(adapter, module, PROMPT, Sampling(count, temperature=0), adapter.context_length())
    assert len(ids) == count  # each is moved to the CPU, so the GPU has finished
    return count / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", choices=["gpt2", "modern"], default="modern")
    parser.add_argument("--size", choices=["tiny", *SIZES], default="tiny")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = make_config(arguments)
    cached, recomputing = (kind(config, arguments.vocabulary) for kind in (GPTAdapter, Recomputing))
    module = cached.build().to(arguments.device).eval()
    for adapter in (cached, recomputing):
        tokens_per_second(adapter, module, 4)  # warm up
    ratios = []
    for _ in range(arguments.rounds):
        fast, slow = (tokens_per_second(adapter, module, arguments.tokens) for adapter in (cached, recomputing))
        ratios.append(fast / slow)
        print(f"cache {fast:8.1f} tokens/s, recomputing {slow:8.1f} tokens/s, ratio {fast / slow:.2f}")
    print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
