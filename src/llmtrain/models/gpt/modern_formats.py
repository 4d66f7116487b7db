"""The two transformers formats of the modern architecture: Qwen3 for `mlp: swiglu`, NanoChat for `mlp: relu2`.

Qwen3 is the same model with its fused matrices split.

NanoChat's norms have no weights, so ours are folded into the next matrix: norm(x) * w, times a matrix, is norm(x) times
that matrix with its columns multiplied by w. The last norm precedes the output layer, which therefore gets a matrix of
its own, also if it is tied to the embedding during training. NanoChat rotates in the other direction; swapping the
halves of each query and key head turns one into the other.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from llmtrain.config.model import ModernGptSection
from llmtrain.models.gpt.format_files import (
    State,
    check_fields,
    check_settings,
    pad_vocab,
    read_files,
    write_files,
)
from llmtrain.models.gpt.modern import NORM_EPS, fused_rows

# Ours -> theirs, inside a block. A fused matrix of ours is several of theirs.
_QKV = ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"]
_QWEN3_BLOCK = {
    "norm_1.weight": ["input_layernorm.weight"],
    "attn.qkv.weight": _QKV,
    "attn.q_norm": ["self_attn.q_norm.weight"],
    "attn.k_norm": ["self_attn.k_norm.weight"],
    "attn.proj.weight": ["self_attn.o_proj.weight"],
    "norm_2.weight": ["post_attention_layernorm.weight"],
    "mlp.gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.down.weight": ["mlp.down_proj.weight"],
}
_NANOCHAT_BLOCK = {
    "attn.qkv.weight": _QKV,
    "attn.proj.weight": ["self_attn.o_proj.weight"],
    "mlp.up.weight": ["mlp.fc1.weight"],
    "mlp.down.weight": ["mlp.fc2.weight"],
}
# Ours -> theirs, outside of the blocks.
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_QWEN3_OUTER = {"wte.weight": _EMBEDDING, "norm_f.weight": "model.norm.weight", "lm_head.weight": _HEAD}
_VOCABULARY = ("wte.weight", "lm_head.weight")
# Fields that change what the same weights compute, and that our config does not have. Also transformers' defaults.
_FIXED = {"rms_norm_eps": NORM_EPS, "use_sliding_window": False, "rope_type": "default"}


def write_qwen3(
    directory: Path, config: ModernGptSection, vocab_size: int, state: State, end_of_text: int | None, dtype: str
) -> None:
    tensors = {}
    for ours, theirs in _QWEN3_OUTER.items():
        if ours in _VOCABULARY and ours in state:
            tensors[theirs] = state[ours][:vocab_size]  # without the padding
        elif ours in state:
            tensors[theirs] = state[ours]
    for layer in range(config.shape.n_layers):
        block = _unfuse(_below(state, f"h.{layer}."), fused_rows(config), _QWEN3_BLOCK)
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in block.items()}
    write_files(directory, tensors, qwen3_config(config, vocab_size), end_of_text, dtype)


def qwen3_config(config: ModernGptSection, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        **_qwen3_fields(config, vocab_size),
        **_other_fields(config),
        "use_sliding_window": False,
    }


def read_qwen3(directory: Path, config: ModernGptSection, vocab_size: int) -> State:
    """The state dict of a modern GPT with this config, from a directory in Qwen3 format; refuses another shape."""
    actual, tensors = read_files(directory, "Qwen3")
    _check(directory, _qwen3_fields(config, vocab_size), actual)
    state = {ours: tensors[theirs] for ours, theirs in _QWEN3_OUTER.items() if theirs in tensors}
    if config.tie_embeddings:
        state.pop("lm_head.weight", None)  # the second copy of a tied matrix
    for name in _VOCABULARY:
        if name in state:
            state[name] = pad_vocab(state[name], vocab_size)
    for layer in range(config.shape.n_layers):
        block = _fuse(_below(tensors, f"model.layers.{layer}."), _QWEN3_BLOCK)
        state |= {f"h.{layer}.{name}": tensor for name, tensor in block.items()}
    return state


def write_nanochat(
    directory: Path, config: ModernGptSection, vocab_size: int, state: State, end_of_text: int | None, dtype: str
) -> None:
    head = state["wte.weight"] if config.tie_embeddings else state["lm_head.weight"]
    tensors = {_EMBEDDING: state["wte.weight"][:vocab_size], _HEAD: head[:vocab_size] * state["norm_f.weight"]}
    for layer in range(config.shape.n_layers):
        block = _below(state, f"h.{layer}.")
        block["attn.qkv.weight"] = _swap_halves(block["attn.qkv.weight"] * block["norm_1.weight"], config)
        block["mlp.up.weight"] = block["mlp.up.weight"] * block["norm_2.weight"]
        named = _unfuse(block, fused_rows(config), _NANOCHAT_BLOCK)
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in named.items()}
    write_files(directory, tensors, nanochat_config(config, vocab_size), end_of_text, dtype)


def nanochat_config(config: ModernGptSection, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["NanoChatForCausalLM"],
        **_nanochat_fields(config, vocab_size),
        **_other_fields(config),
        "tie_word_embeddings": False,
    }


def read_nanochat(directory: Path, config: ModernGptSection, vocab_size: int) -> State:
    """The state dict of a modern GPT with this config, from a directory in NanoChat format; refuses another shape."""
    actual, tensors = read_files(directory, "NanoChat")
    _check(directory, _nanochat_fields(config, vocab_size), actual)
    outer = {"wte.weight": _EMBEDDING}
    if not config.tie_embeddings:
        outer["lm_head.weight"] = _HEAD
    state = {ours: pad_vocab(tensors[theirs], vocab_size) for ours, theirs in outer.items() if theirs in tensors}
    ones = torch.ones(config.shape.d_model)
    state["norm_f.weight"] = ones
    for layer in range(config.shape.n_layers):
        block = _fuse(_below(tensors, f"model.layers.{layer}."), _NANOCHAT_BLOCK)
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


# Fields of config.json


def _qwen3_fields(config: ModernGptSection, vocab_size: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        **_common_fields(config, vocab_size),
        "head_dim": config.shape.head_dim,
        "hidden_act": "silu",
    }


def _nanochat_fields(config: ModernGptSection, vocab_size: int) -> dict[str, Any]:
    return {
        "model_type": "nanochat",
        **_common_fields(config, vocab_size),
        "hidden_act": "relu2",
        "final_logit_softcapping": None,
    }


def _common_fields(config: ModernGptSection, vocab_size: int) -> dict[str, Any]:
    """Fields that both formats have, and that the weights depend on."""
    shape = config.shape
    return {
        "vocab_size": vocab_size,
        "hidden_size": shape.d_model,
        "intermediate_size": shape.d_ff,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "attention_bias": False,
        "rope_theta": config.rope_theta,  # for vLLM, llama.cpp and transformers before version 5
        "tie_word_embeddings": config.tie_embeddings,
    }


def _other_fields(config: ModernGptSection) -> dict[str, Any]:
    """Fields that both have, and that a model to start from may have otherwise, or lack."""
    return {
        "max_position_embeddings": config.block_size,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": NORM_EPS,
        "attention_dropout": 0.0,
    }


def _check(directory: Path, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
    """Refuse a model of another format or shape, and one with settings that a modern GPT does not have."""
    rope = actual.get("rope_parameters") or actual.get("rope_scaling") or {}  # the second one: before version 5
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    check_fields(directory, expected, {**actual, **rope})
    check_settings(directory, _FIXED, {**actual, "rope_type": rope_type})


# Names of tensors


def _unfuse(block: State, rows: Mapping[str, list[int]], names: Mapping[str, list[str]]) -> State:
    """One block with other names: a matrix with `rows` is split into one tensor per name."""
    parts: State = {}
    for ours, theirs in names.items():
        if ours in rows:
            parts |= zip(theirs, block[ours].split_with_sizes(rows[ours]), strict=True)
        else:
            parts[theirs[0]] = block[ours]
    return parts


def _fuse(tensors: State, names: Mapping[str, list[str]]) -> State:
    """The inverse of _unfuse. What is missing is left out: load_state_dict lists it."""
    block: State = {}
    for ours, theirs in names.items():
        if all(name in tensors for name in theirs):
            block[ours] = torch.cat([tensors[name] for name in theirs])
    return block


def _below(state: State, prefix: str) -> State:
    """The tensors below a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
