"""The Qwen3 format of transformers, for `mlp: swiglu`: the same model, its fused matrices split."""

from pathlib import Path
from typing import Any

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

# Ours -> Qwen3's, inside a block.
_BLOCK = {
    "norm_1.weight": ["input_layernorm.weight"],
    "attn.qkv.weight": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    "attn.q_norm": ["self_attn.q_norm.weight"],
    "attn.k_norm": ["self_attn.k_norm.weight"],
    "attn.proj.weight": ["self_attn.o_proj.weight"],
    "norm_2.weight": ["post_attention_layernorm.weight"],
    "mlp.gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.down.weight": ["mlp.down_proj.weight"],
}
_OUTER = {
    "wte.weight": "model.embed_tokens.weight",
    "norm_f.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_VOCABULARY = ("wte.weight", "lm_head.weight")


def write_qwen3(
    directory: Path, config: ModernGptSection, vocab_size: int, state: State, end_of_text: int | None, dtype: str
) -> None:
    tensors = {
        theirs: state[ours][:vocab_size] if ours in _VOCABULARY else state[ours]
        for ours, theirs in _OUTER.items()
        if ours in state
    }
    for layer in range(config.shape.n_layers):
        block = unfuse(block_of(state, f"h.{layer}."), fused_rows(config), _BLOCK)
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in block.items()}
    values = {
        "architectures": ["Qwen3ForCausalLM"],
        **_fields(config, vocab_size),
        **other_modern_fields(config),
        "use_sliding_window": False,
    }
    write_files(directory, tensors, values, end_of_text, dtype)


def _fields(config: ModernGptSection, vocab_size: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        **modern_fields(config, vocab_size),
        "head_dim": config.shape.head_dim,
        "hidden_act": "silu",
    }


def read_qwen3(directory: Path, config: ModernGptSection, vocab_size: int) -> State:
    """The state dict of a modern GPT with this config, from a directory in Qwen3 format; refuses another shape."""
    actual, tensors = read_files(directory, "Qwen3")
    check_modern(directory, _fields(config, vocab_size), actual)
    state = {ours: tensors[theirs] for ours, theirs in _OUTER.items() if theirs in tensors}
    if config.tie_embeddings:
        state.pop("lm_head.weight", None)  # the second copy of a tied matrix
    state |= {name: pad_vocab(state[name], vocab_size) for name in _VOCABULARY if name in state}
    for layer in range(config.shape.n_layers):
        block = fuse(block_of(tensors, f"model.layers.{layer}."), _BLOCK)
        state |= {f"h.{layer}.{name}": tensor for name, tensor in block.items()}
    return state
