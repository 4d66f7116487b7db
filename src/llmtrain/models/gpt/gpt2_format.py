"""The transformers GPT-2 format: model.safetensors and config.json, written and read without transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from llmtrain.config.model import GptSection
from llmtrain.errors import DataError, UsageError
from llmtrain.models.gpt.model import padded_vocab

State = dict[str, torch.Tensor]
_PREFIX = "transformer."
# GPT-2's Conv1D keeps these (in, out); a Linear keeps them (out, in).
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_VOCABULARY = ("wte.weight", "lm_head.weight")


def write_gpt2(
    folder: Path,
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
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = {**_gpt2_config(config, vocab_size), "eos_token_id": end_of_text, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def _gpt2_config(config: GptSection, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": config.block_size,
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


def read_gpt2(folder: Path, config: GptSection, vocab_size: int) -> State:
    """The state of a GPT with this config from a directory in GPT-2 format; refuses another shape."""
    try:
        given = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as problem:
        raise UsageError(
            f"model.init {folder} is not a model in GPT-2 format: {problem}.",
            remedy="It needs config.json and model.safetensors; `llmtrain export` writes both.",
        ) from None
    _check_shape(folder, config, vocab_size, given)
    state = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix(_PREFIX)
        if plain.endswith((".attn.bias", ".attn.masked_bias")) or (plain == "lm_head.weight" and config.tie_embeddings):
            continue  # masks of old files, and the second copy of a tied matrix
        value = tensor.t() if plain.endswith(_TRANSPOSED) else tensor
        state[plain] = _pad_rows(value, vocab_size) if plain in _VOCABULARY else value.contiguous()
    return state


def _check_shape(folder: Path, config: GptSection, vocab_size: int, given: dict[str, Any]) -> None:
    wanted = _gpt2_config(config, vocab_size)
    names = (
        "model_type",
        "vocab_size",
        "n_positions",
        "n_embd",
        "n_layer",
        "n_head",
        "n_inner",
        "activation_function",
    )
    given = {**given, "n_inner": given.get("n_inner") or 4 * int(given.get("n_embd", 0))}
    wrong = [
        f"{name} is {given.get(name)} there, {wanted[name]} here" for name in names if given.get(name) != wanted[name]
    ]
    if given.get("tie_word_embeddings", True) != config.tie_embeddings:
        wrong.append(
            f"tie_word_embeddings is {given.get('tie_word_embeddings', True)} there, {config.tie_embeddings} here"
        )
    if wrong:
        raise DataError(
            f"model.init {folder} is another model: {'; '.join(wrong)}.",
            remedy="Set the fields of the model section to that model's.",
        )


def _pad_rows(matrix: torch.Tensor, vocab_size: int) -> torch.Tensor:
    missing = padded_vocab(vocab_size) - len(matrix)
    return torch.cat([matrix, matrix.new_zeros(missing, matrix.shape[1])]) if missing else matrix.contiguous()
