"""What the transformers formats of a GPT share: model.safetensors, config.json and generation_config.json, written and
read without transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from llmtrain.config.model import ModernGptSection
from llmtrain.errors import DataError, UsageError
from llmtrain.files import use_default_mode
from llmtrain.models.gpt.model import padded_vocab_size
from llmtrain.models.gpt.modern import NORM_EPS

State = dict[str, torch.Tensor]
# model_type of a format -> the fields of a config that have it.
_FIELDS_OF = {
    "gpt2": "model.architecture to gpt2",
    "qwen3": "model.architecture to modern and model.mlp to swiglu",
    "nanochat": "model.architecture to modern and model.mlp to relu2",
}


def write_files(directory: Path, tensors: State, config: dict[str, Any], end_of_text: int | None, dtype: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in tensors.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    use_default_mode(directory / "model.safetensors")
    # Documents begin after the end of the previous one. Padding is masked, so that any token will do.
    special_tokens = {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "pad_token_id": end_of_text}
    values = {**config, **special_tokens, "torch_dtype": dtype}
    for name, content in (("config.json", values), ("generation_config.json", special_tokens)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_files(directory: Path, label: str) -> tuple[dict[str, Any], State]:
    """config.json and the tensors of a directory. `label`: the format that is expected, for the error message."""
    try:
        return json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as problem:
        raise UsageError(
            f"model.init must be a directory in {label} format, got {directory}: {problem}.",
            remedy="It must contain config.json and model.safetensors; `llmtrain export` writes both.",
        ) from None


def modern_fields(config: ModernGptSection, vocab_size: int) -> dict[str, Any]:
    """Fields of config.json that both formats of a modern GPT have, and that its weights depend on."""
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


def other_modern_fields(config: ModernGptSection) -> dict[str, Any]:
    """Fields that both have, and that a model to start from may have otherwise, or lack."""
    return {
        "max_position_embeddings": config.block_size,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": NORM_EPS,
        "attention_dropout": 0.0,
    }


# Fields that change what the same weights compute, and that our config does not have. Also transformers' defaults.
_FIXED = {"rms_norm_eps": NORM_EPS, "use_sliding_window": False}
_FIXED_GPT2 = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def check_gpt2(directory: Path, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
    """Refuse a model of another format or shape, and one with settings that a GPT-2 of ours does not have."""
    check_fields(directory, expected, actual)
    _refuse(directory, _differences(_FIXED_GPT2, actual))


def check_modern(directory: Path, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
    """Refuse a model of another format or shape, and one with settings that a modern GPT does not have."""
    rope = actual.get("rope_parameters") or actual.get("rope_scaling") or {}
    check_fields(directory, expected, {**actual, **rope})
    kind = rope.get("rope_type", rope.get("type", "default"))
    _refuse(directory, [*_differences(_FIXED, actual), *([f"rope_type {kind}"] if kind != "default" else [])])


def _differences(fixed: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    return [f"{name} {actual[name]}" for name, value in fixed.items() if actual.get(name, value) != value]


def _refuse(directory: Path, others: list[str]) -> None:
    if others:
        raise DataError(
            f"model.init {directory} has {' and '.join(others)}, which a gpt cannot have.",
            remedy="Train it further with model.name hf_causal_lm and model.path.",
        )


def check_fields(directory: Path, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
    """Refuse a model of another format or shape."""
    found, wanted = actual.get("model_type"), expected["model_type"]
    if found != wanted:
        raise DataError(
            f"model.init {directory} is a {found} model, and a model with this config is a {wanted} one.",
            remedy=f"Set {_FIELDS_OF[str(found)]}."
            if found in _FIELDS_OF
            else "To train a model of another kind further, use model.name hf_causal_lm with model.path.",
        )
    differences = [
        f"{name} is {actual.get(name)} there and {value} in this config"
        for name, value in expected.items()
        if actual.get(name) != value
    ]
    if differences:
        raise DataError(
            f"model.init {directory} does not fit the config: {'; '.join(differences)}.",
            remedy="Set the fields of the model section to the values of that model.",
        )


def pad_vocab(matrix: torch.Tensor, vocab_size: int) -> torch.Tensor:
    missing = padded_vocab_size(vocab_size) - len(matrix)
    return torch.cat([matrix, matrix.new_zeros(missing, matrix.shape[1])]) if missing else matrix.contiguous()


def unfuse(state: State, rows: Mapping[str, list[int]], names: Mapping[str, list[str]]) -> State:
    """One block with other names: a matrix with `rows` is split into one tensor per name."""
    parts: State = {}
    for ours, theirs in names.items():
        split = state[ours].split_with_sizes(rows[ours]) if ours in rows else (state[ours],)
        parts |= dict(zip(theirs, split, strict=True))
    return parts


def fuse(tensors: State, names: Mapping[str, list[str]]) -> State:
    """The inverse of unfuse. What is missing is left out: load_state_dict lists it."""
    present = {ours: theirs for ours, theirs in names.items() if all(name in tensors for name in theirs)}
    return {ours: torch.cat([tensors[name] for name in theirs]) for ours, theirs in present.items()}


def block_of(state: State, prefix: str) -> State:
    """The tensors below a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
