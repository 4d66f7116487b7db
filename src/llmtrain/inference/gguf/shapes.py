"""The architectures of llama.cpp that an export can have: which settings they allow, their metadata, their weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Fields = Mapping[str, Any]
"""config.json of an export for transformers."""


@dataclass(frozen=True)
class Shape:
    """`settings`: field of config.json -> the values that llama.cpp computes. A field that is missing has the first."""

    settings: dict[str, tuple[object, ...]]
    add_metadata: Callable[[Any, Fields], None]
    """Called with a gguf.GGUFWriter."""
    convert: Callable[[str, torch.Tensor, Fields], torch.Tensor]
    """Called with the name of a tensor in transformers."""


def shape_problem(config: Fields | None) -> str | None:
    """Why llama.cpp cannot compute a model with this config; None if it can."""
    if config is None:
        return "the model has no transformers format to start from"
    model_type = config.get("model_type")
    shape = SHAPES.get(str(model_type))
    if shape is None:
        return f"models of type {model_type} are not supported, only {', '.join(SHAPES)}"
    for name, accepted in shape.settings.items():
        value = rope_type(config) if name == "rope_type" else config.get(name, accepted[0])
        if value not in accepted:
            return f"{name} is {value!r}; supported: {', '.join(map(repr, accepted))}"
    return None


def rope_type(config: Fields) -> str:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # the second one: transformers before 5
    return str(rope.get("rope_type", rope.get("type", "default")))


def _rope_theta(config: Fields) -> float:
    rope = config.get("rope_parameters") or {}
    return float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)


def _head_dim(config: Fields) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _add_decoder(writer: Any, config: Fields) -> None:
    """Llama and Qwen3."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(_rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_gpt2(writer: Any, config: Fields) -> None:
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _as_is(name: str, tensor: torch.Tensor, config: Fields) -> torch.Tensor:  # noqa: ARG001
    return tensor


def _convert_llama(name: str, tensor: torch.Tensor, config: Fields) -> torch.Tensor:
    """llama.cpp rotates neighboring pairs of a head's rows, transformers row i with row i + half: reorder the rows."""
    heads = config["num_attention_heads"]
    if name.endswith("k_proj.weight"):
        heads = config.get("num_key_value_heads") or heads
    elif not name.endswith("q_proj.weight"):
        return tensor
    halves = tensor.reshape(heads, 2, -1, tensor.shape[1])  # (heads, 2, half of a head, width)
    return halves.transpose(1, 2).reshape(tensor.shape)


def _convert_gpt2(name: str, tensor: torch.Tensor, config: Fields) -> torch.Tensor:  # noqa: ARG001
    """GPT-2's Conv1D stores (in, out), llama.cpp (out, in)."""
    if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return tensor.t()
    return tensor


SHAPES = {
    "gpt2": Shape(
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        _add_gpt2,
        _convert_gpt2,
    ),
    "llama": Shape(
        {
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "rope_type": ("default",),
        },
        _add_decoder,
        _convert_llama,
    ),
    "qwen3": Shape(
        {
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "use_sliding_window": (False,),
            "rope_type": ("default",),
        },
        _add_decoder,
        _as_is,
    ),
}
"""model_type of transformers, which is also the name of the architecture in llama.cpp -> its shape."""
