"""The GPT-2 format of transformers: model.safetensors and config.json, written and read without transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from llmtrain.config.model import GptSection
from llmtrain.errors import DataError, UsageError
from llmtrain.files import use_default_mode
from llmtrain.models.gpt.model import padded_vocab_size

State = dict[str, torch.Tensor]
_PREFIX = "transformer."
# GPT-2's Conv1D stores these as (in, out), nn.Linear as (out, in).
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_VOCABULARY = ("wte.weight", "lm_head.weight")


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
        value = tensor.detach().cpu().to(getattr(torch, dtype))
        if name in _VOCABULARY:
            value = value[:vocab_size]
        if name.endswith(_TRANSPOSED):
            value = value.t()
        tensors[name if name == "lm_head.weight" else _PREFIX + name] = value.contiguous()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    use_default_mode(directory / "model.safetensors")
    # Documents begin after the end of the previous one. Padding is masked, so that any token will do.
    special_tokens = {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "pad_token_id": end_of_text}
    values = {**_gpt2_config(config, vocab_size), **special_tokens, "torch_dtype": dtype}
    for name, content in (("config.json", values), ("generation_config.json", special_tokens)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _gpt2_config(config: GptSection, vocab_size: int) -> dict[str, Any]:
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
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


def read_gpt2(directory: Path, config: GptSection, vocab_size: int) -> State:
    """The state dict of a GPT with this config, read from a directory in GPT-2 format; refuses another shape."""
    try:
        gpt2_config = json.loads((directory / "config.json").read_text())
        tensors = load_file(directory / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as problem:
        raise UsageError(
            f"model.init must be a directory in GPT-2 format, got {directory}: {problem}.",
            remedy="It must contain config.json and model.safetensors; `llmtrain export` writes both.",
        ) from None
    _check_shape(directory, config, vocab_size, gpt2_config)
    state = {}
    for name, tensor in tensors.items():
        key = name.removeprefix(_PREFIX)
        if key.endswith((".attn.bias", ".attn.masked_bias")) or (key == "lm_head.weight" and config.tie_embeddings):
            continue  # attention masks in old files, and the second copy of a tied matrix
        value = tensor.t() if key.endswith(_TRANSPOSED) else tensor
        state[key] = _pad_vocab(value, vocab_size) if key in _VOCABULARY else value.contiguous()
    return state


def _check_shape(directory: Path, config: GptSection, vocab_size: int, actual: dict[str, Any]) -> None:
    expected = _gpt2_config(config, vocab_size)
    names = (
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
    actual = {
        **actual,
        "n_inner": actual.get("n_inner") or 4 * int(actual.get("n_embd", 0)),
        "tie_word_embeddings": actual.get("tie_word_embeddings", True),
    }
    differences = [
        f"{name} is {actual.get(name)} there and {expected[name]} in this config"
        for name in names
        if actual.get(name) != expected[name]
    ]
    if differences:
        raise DataError(
            f"model.init {directory} does not fit the config: {'; '.join(differences)}.",
            remedy="Set the fields of the model section to the values of that model.",
        )


def _pad_vocab(matrix: torch.Tensor, vocab_size: int) -> torch.Tensor:
    missing = padded_vocab_size(vocab_size) - len(matrix)
    return torch.cat([matrix, matrix.new_zeros(missing, matrix.shape[1])]) if missing else matrix.contiguous()
