"""Tokens per second of generation as `llmtrain generate` does it, compared with slower ways in the same process.

    python benchmarks/generate_speed.py [--architecture gpt2 --size 124m --tokens 256 --device cuda]

`replayed`: a KV cache of fixed shape and the replay of a CUDA graph per token, as generation does on a GPU. `launched`:
a KV cache and kernels launched from Python, as generation does on a CPU. `recomputing`: the whole context for each
token. All generate the same number of tokens after the same prompt, greedily, with a model of random weights. Prints
every round, how many tokens of the texts agree from the start, and the median of the ratios. In bfloat16 the texts may
differ after two tokens whose logits differ by rounding only.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn

from llmtrain.config.model import GptSection, ModernGptSection
from llmtrain.config.sizes import SIZES, default_heads
from llmtrain.models.base import ModelAdapter, NextLogits
from llmtrain.models.compute_dtype import copy_in
from llmtrain.models.gpt.adapter import GPTAdapter
from llmtrain.models.gpt.decoding import LaunchedDecoding
from llmtrain.training.text_generation import Sampling, sample_ids

PROMPT = list(range(1, 17))


class Launched(GPTAdapter):
    """With a KV cache that grows."""

    def next_logits(self, module: nn.Module, block_size: int) -> NextLogits:
        return LaunchedDecoding(module, len(self.blocks(module)), block_size)


class Recomputing(GPTAdapter):
    """Without the cache."""

    next_logits = ModelAdapter.next_logits


def make_config(arguments: argparse.Namespace) -> GptSection | ModernGptSection:
    layers, width = SIZES.get(arguments.size, (4, 128))
    if arguments.architecture == "modern":
        return ModernGptSection(n_layers=layers, d_model=width, block_size=arguments.context)
    return GptSection(n_layers=layers, d_model=width, n_heads=default_heads(width), block_size=arguments.context)


def make_module(adapter: GPTAdapter, device: str, dtype: torch.dtype) -> nn.Module:
    """Its output projections start at zero, with which every text is the same."""
    module = adapter.build()
    for parameter in module.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
    return copy_in(module.to(device), dtype).eval()


def generate(adapter: GPTAdapter, module: nn.Module, count: int) -> tuple[list[int], float]:
    """(token ids, tokens per second), from the prompt to the last token, with the capture of graphs."""
    started = time.perf_counter()
    ids = sample_ids(adapter, module, PROMPT, Sampling(count, temperature=0), adapter.context_length())
    assert len(ids) == count  # each is moved to the CPU, so the GPU has finished
    return ids, count / (time.perf_counter() - started)


def equal_tokens(texts: list[list[int]]) -> int:
    """How many tokens all texts share from the start on."""
    for number, tokens in enumerate(zip(*texts, strict=True)):
        if len(set(tokens)) > 1:
            return number
    return len(texts[0])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", choices=["gpt2", "modern"], default="modern")
    parser.add_argument("--size", choices=["tiny", *SIZES], default="tiny")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU, float32 on a CPU")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.manual_seed(0)
    config = make_config(arguments)
    is_gpu = arguments.device.startswith("cuda")
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if is_gpu else "float32"))
    kinds: dict[str, Any] = {"launched": Launched, "recomputing": Recomputing}
    if is_gpu:
        kinds = {"replayed": GPTAdapter, **kinds}
    adapters = {name: kind(config, arguments.vocabulary) for name, kind in kinds.items()}
    module = make_module(next(iter(adapters.values())), arguments.device, dtype)
    for adapter in adapters.values():
        generate(adapter, module, 4)  # warm up
    first, *others = adapters
    ratios: dict[str, list[float]] = {name: [] for name in others}
    for _ in range(arguments.rounds):
        speeds = {}
        texts = []
        for name, adapter in adapters.items():
            ids, speeds[name] = generate(adapter, module, arguments.tokens)
            texts.append(ids)
        for name in others:
            ratios[name].append(speeds[first] / speeds[name])
        shown = ", ".join(f"{name} {speed:8.1f} tokens/s" for name, speed in speeds.items())
        print(f"{shown}; the first {equal_tokens(texts)} of {arguments.tokens} tokens agree")
    for name in others:
        print(f"{first} / {name}: median ratio {statistics.median(ratios[name]):.2f}")


if __name__ == "__main__":
    main()
