"""What the transformers formats of a GPT share: model.safetensors, config.json and generation_config.json, written and
read without transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from llmtrain.core.files import use_default_mode
from llmtrain.errors import DataError, UsageError
from llmtrain.models.sizes import padded_vocab_size

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


def check_fields(directory: Path, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
    """Refuse a model of another format or shape."""
    found = actual.get("model_type")
    wanted = expected["model_type"]
    if found != wanted:
        remedy = "To train a model of another kind further, use model.name hf_causal_lm with model.path."
        if found in _FIELDS_OF:
            remedy = f"Set {_FIELDS_OF[str(found)]}."
        raise DataError(
            f"model.init {directory} is a {found} model, and a model with this config is a {wanted} one.", remedy=remedy
        )
    differences = []
    for name, value in expected.items():
        if actual.get(name) != value:
            differences.append(f"{name} is {actual.get(name)} there and {value} in this config")
    if differences:
        raise DataError(
            f"model.init {directory} does not fit the config: {'; '.join(differences)}.",
            remedy="Set the fields of the model section to the values of that model.",
        )


def check_settings(directory: Path, fixed: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
    """Refuse a model with settings that change what its weights compute, and that a GPT of ours cannot have. `fixed`:
    the values of a GPT of ours, which are also transformers' defaults."""
    others = [f"{name} {actual[name]}" for name, value in fixed.items() if actual.get(name, value) != value]
    if others:
        raise DataError(
            f"model.init {directory} has {' and '.join(others)}, which a gpt cannot have.",
            remedy="Train it further with model.name hf_causal_lm and model.path.",
        )


def pad_vocab(matrix: torch.Tensor, vocab_size: int) -> torch.Tensor:  # (vocab_size, C) -> (V, C)
    missing = padded_vocab_size(vocab_size) - len(matrix)
    if not missing:
        return matrix.contiguous()
    return torch.cat([matrix, matrix.new_zeros(missing, matrix.shape[1])])
