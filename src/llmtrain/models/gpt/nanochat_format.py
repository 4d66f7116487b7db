"""The NanoChat format of transformers, for `mlp: relu2`.

NanoChat's norms have no weights, so ours are folded into the next matrix: norm(x) * w, times a matrix, is norm(x) times
that matrix with its columns multiplied by w. The last norm precedes the output layer, which therefore gets a matrix of
its own, also if it is tied to the embedding during training. NanoChat rotates in the other direction; swapping the
halves of each query and key head turns one into the other.
"""

from pathlib import Path
from typing import Any

import torch

from llmtrain.config.model import ModernGptSection
from llmtrain.models.gpt.format_files import (
    State,
    block_of,
    check_modern,
    fuse,
    modern_fields,
    other_modern_fields,
    pad_vocab,
    read_files,
    unfuse,
    write_files,
)
from llmtrain.models.gpt.modern import fused_rows

# Ours -> NanoChat's, inside a block.
_BLOCK = {
    "attn.qkv.weight": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    "attn.proj.weight": ["self_attn.o_proj.weight"],
    "mlp.up.weight": ["mlp.fc1.weight"],
    "mlp.down.weight": ["mlp.fc2.weight"],
}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write_nanochat(
    directory: Path, config: ModernGptSection, vocab_size: int, state: State, end_of_text: int | None, dtype: str
) -> None:
    head = state["wte.weight"] if config.tie_embeddings else state["lm_head.weight"]
    tensors = {_EMBEDDING: state["wte.weight"][:vocab_size], _HEAD: head[:vocab_size] * state["norm_f.weight"]}
    for layer in range(config.shape.n_layers):
        block = block_of(state, f"h.{layer}.")
        block["attn.qkv.weight"] = _swap_halves(block["attn.qkv.weight"] * block["norm_1.weight"], config)
        block["mlp.up.weight"] = block["mlp.up.weight"] * block["norm_2.weight"]
        named = unfuse(block, fused_rows(config), _BLOCK)
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in named.items()}
    values = {
        "architectures": ["NanoChatForCausalLM"],
        **_fields(config, vocab_size),
        **other_modern_fields(config),
        "tie_word_embeddings": False,
    }
    write_files(directory, tensors, values, end_of_text, dtype)


def _fields(config: ModernGptSection, vocab_size: int) -> dict[str, Any]:
    return {
        "model_type": "nanochat",
        **modern_fields(config, vocab_size),
        "hidden_act": "relu2",
        "final_logit_softcapping": None,
    }


def read_nanochat(directory: Path, config: ModernGptSection, vocab_size: int) -> State:
    """The state dict of a modern GPT with this config, from a directory in NanoChat format; refuses another shape."""
    actual, tensors = read_files(directory, "NanoChat")
    check_modern(directory, _fields(config, vocab_size), actual)
    ones = torch.ones(config.shape.d_model)
    outer = {"wte.weight": _EMBEDDING} | ({} if config.tie_embeddings else {"lm_head.weight": _HEAD})
    state = {ours: pad_vocab(tensors[theirs], vocab_size) for ours, theirs in outer.items() if theirs in tensors}
    state["norm_f.weight"] = ones
    for layer in range(config.shape.n_layers):
        block = fuse(block_of(tensors, f"model.layers.{layer}."), _BLOCK)
        if "attn.qkv.weight" in block:
            block["attn.qkv.weight"] = _swap_halves(block["attn.qkv.weight"], config)
        block |= {"norm_1.weight": ones, "norm_2.weight": ones}
        state |= {f"h.{layer}.{name}": tensor for name, tensor in block.items()}
    return state


def _swap_halves(qkv: torch.Tensor, config: ModernGptSection) -> torch.Tensor:
    """Swap the first and second half of the rows of each query and key head; value heads stay."""
    shape = config.shape
    heads = shape.n_heads + shape.n_kv_heads
    qk, v = qkv.split_with_sizes((heads * shape.head_dim, shape.n_kv_heads * shape.head_dim))
    swapped = qk.view(heads, 2, shape.head_dim // 2, shape.d_model).flip(1).reshape(qk.shape)
    return torch.cat([swapped, v])
