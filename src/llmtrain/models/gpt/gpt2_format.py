"""The GPT-2 format of transformers."""

from pathlib import Path
from typing import Any

from llmtrain.config.model import GptSection
from llmtrain.models.gpt.format_files import State, check_fields, check_settings, pad_vocab, read_files, write_files

_PREFIX = "transformer."
# GPT-2's Conv1D stores these as (in, out), nn.Linear as (out, in).
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_VOCABULARY = ("wte.weight", "lm_head.weight")
_SHAPE = (
    "model_type",
    "vocab_size",
    "n_positions",
    "n_embd",
    "n_layer",
    "n_head",
    "n_inner",
    "activation_function",
    "tie_word_embeddings",
)
# Settings that change what the same weights compute, and that our config does not have.
_FIXED = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def write_gpt2(
    directory: Path,
    config: GptSection,
    vocab_size: int,
    state: State,
    end_of_text: int | None = None,
    dtype: str = "float32",
) -> None:
    tensors = {}
    for name, tensor in state.items():
        value = tensor.detach().cpu()
        if name in _VOCABULARY:
            value = value[:vocab_size]
        if name.endswith(_TRANSPOSED):
            value = value.t()
        prefix = "" if name == "lm_head.weight" else _PREFIX
        tensors[prefix + name] = value
    write_files(directory, tensors, gpt2_config(config, vocab_size), end_of_text, dtype)


def gpt2_config(config: GptSection, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,  # the same, for llama.cpp
        "n_embd": config.d_model,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "n_inner": config.d_ff or 4 * config.d_model,
        "activation_function": "gelu_new",
        "attn_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": config.tie_embeddings,
    }


def read_gpt2(directory: Path, config: GptSection, vocab_size: int) -> State:
    """The state dict of a GPT with this config, read from a directory in GPT-2 format; refuses another shape."""
    actual, tensors = read_files(directory, "GPT-2")
    actual = {
        **actual,
        "n_inner": actual.get("n_inner") or 4 * int(actual.get("n_embd", 0)),
        "tie_word_embeddings": actual.get("tie_word_embeddings", True),
    }
    expected = gpt2_config(config, vocab_size)
    check_fields(directory, {name: expected[name] for name in _SHAPE}, actual)
    check_settings(directory, _FIXED, actual)
    state = {}
    for name, tensor in tensors.items():
        key = name.removeprefix(_PREFIX)
        is_mask = key.endswith((".attn.bias", ".attn.masked_bias"))  # in old files
        is_second_copy = key == "lm_head.weight" and config.tie_embeddings
        if is_mask or is_second_copy:
            continue
        if key in _VOCABULARY:
            state[key] = pad_vocab(tensor, vocab_size)
        elif key.endswith(_TRANSPOSED):
            state[key] = tensor.t().contiguous()
        else:
            state[key] = tensor.contiguous()
    return state
