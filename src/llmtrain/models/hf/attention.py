"""Which attention implementation of transformers a model uses, and its mask for packed examples."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

FLEX = "flex_attention"
SDPA = "sdpa"
EAGER = "eager"


def default_attention(config: Any) -> str:
    """What an architecture runs on any device: sdpa, else eager."""
    return SDPA if _supports(config, "_supports_sdpa", unknown=True) else EAGER


def best_attention(config: Any, device: torch.device, is_packed: bool) -> str:
    """The fastest implementation for training.

    sdpa computes the full matrix of a packed sequence, with a mask that its fastest kernels do not accept;
    flex_attention skips blocks in which no position sees another. Without packing, sdpa needs no mask and is faster.
    """
    has_dropout = bool(getattr(config.get_text_config(), "attention_dropout", 0.0))  # flex_attention has none
    if device.type == "cuda" and is_packed and not has_dropout and _supports(config, "_supports_flex_attn"):
        return FLEX
    return default_attention(config)


def has_one_mask(config: Any) -> bool:
    """Whether all layers of the model attend to all earlier positions: none has a sliding window or chunks."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and not getattr(text, "sliding_window", None)


def example_mask(positions: torch.Tensor) -> Any:
    """The block mask of packed examples, for all layers; positions (B, T) restart at 0 with each example.

    transformers builds the same one, but waits for the GPU to see whether there is more than one example, and compiles
    another mask if there is not.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    examples = (positions == 0).cumsum(1)  # (B, T): number of the example

    def is_visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        return (query >= key) & (examples[batch, query] == examples[batch, key])

    count, length = positions.shape
    return create_block_mask(
        is_visible, count, None, length, length, device=positions.device, _compile=positions.is_cuda
    )


@contextmanager
def without_flex(config: Any) -> Iterator[None]:
    """Use sdpa or eager in the place of flex_attention: for generation, which would compile it for every length."""
    before = config._attn_implementation
    if before == FLEX:
        config._attn_implementation = default_attention(config)
    try:
        yield
    finally:
        config._attn_implementation = before


def _supports(config: Any, flag: str, unknown: bool = False) -> bool:
    """A flag of the model's class; `unknown` for code that ships with the model."""
    from transformers import AutoModelForCausalLM

    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        return unknown
    return bool(getattr(mapping[type(config)], flag))
