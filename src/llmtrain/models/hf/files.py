"""Reading a transformers model directory, strictly: missing or mismatched weights are errors, not warnings."""

import importlib.util
import math
import os
from pathlib import Path
from typing import Any

import torch

from llmtrain.config.model import HfCausalLmSection
from llmtrain.errors import DataError, UsageError
from llmtrain.files import read_json
from llmtrain.text import one_line

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
_WEIGHT_FILES = "model.safetensors, or model.safetensors.index.json and its shards"


def check_installed() -> None:
    missing = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"model.name hf_causal_lm requires {' and '.join(missing)}.", remedy="pip install 'llmtrain[hf]'"
        )


def quiet_libraries() -> None:
    """Silence the progress bars and loading reports of transformers; what matters in them is checked here."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)


def read_config(directory: Path, section: HfCausalLmSection) -> Any:
    from transformers import AutoConfig

    if not (directory / "config.json").is_file():
        raise DataError(
            f"{directory} is not a model directory: config.json is missing.",
            remedy="Use a directory written by save_pretrained or `llmtrain fetch-model`.",
        )
    quiet_libraries()
    try:
        return AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=section.trust_remote_code
        )
    except Exception as problem:  # transformers raises many types: unknown architecture, broken JSON, bad fields
        raise DataError(f"Cannot load {directory / 'config.json'}: {_type_and_message(problem)}") from None


def read_weights(directory: Path, config: Any, section: HfCausalLmSection, attention: str) -> Any:
    """The model with its weights, on the CPU (a quantized one on the GPU of this process)."""
    from transformers import AutoModelForCausalLM

    _check_weight_files(directory)
    quiet_libraries()
    options: dict[str, Any] = {
        "config": config,
        "dtype": getattr(torch, section.dtype),
        "attn_implementation": attention,
        "trust_remote_code": section.trust_remote_code,
        "use_safetensors": True,
        "local_files_only": True,
        "output_loading_info": True,
    }
    if section.lora and section.lora.quantize:
        options |= _quantization_options()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(str(directory), **options)
    except Exception as problem:  # transformers raises many types
        is_attention = "attn" in str(problem) or "attention" in str(problem).lower()
        raise DataError(
            f"Cannot load the model in {directory}: {_type_and_message(problem)}",
            remedy="Set model.attention to eager." if is_attention else None,
        ) from None
    for name, what in (("missing_keys", "has missing weights"), ("mismatched_keys", "has weights of the wrong shape")):
        if report.get(name):
            keys = sorted(map(str, report[name]))
            raise DataError(
                f"The model in {directory} {what}: {', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''}."
            )
    return model


def count_weights(directory: Path) -> int | None:
    """Numbers in the weight files that transformers would load, from their headers; None if they cannot be read."""
    from safetensors import SafetensorError, safe_open

    names = {"model.safetensors"}
    if not (directory / "model.safetensors").is_file():
        index = read_json(directory / "model.safetensors.index.json")
        shards = index.get("weight_map") if isinstance(index, dict) else None
        names = set(map(str, shards.values())) if isinstance(shards, dict) else set()
    count = 0
    try:
        for name in names:
            with safe_open(directory / name, framework="pt") as file:
                count += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError):  # building the model reports it
        return None
    return count or None


def _check_weight_files(directory: Path) -> None:
    weights = sorted(directory.glob("*.safetensors"))
    unreadable = next((path for path in weights if path.exists() and not os.access(path, os.R_OK)), None)
    if unreadable:  # safetensors reports it as missing, and saves files that only their owner can read
        raise DataError(
            f"Not allowed to read {unreadable}: it is readable by user id {unreadable.stat().st_uid} and this process "
            f"has {os.geteuid()}.",
            remedy=f"As its owner: chmod a+r {unreadable.parent}/*",
        )
    if weights:
        return
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if pickles:
        raise DataError(
            f"{directory} has only pickled weights ({pickles[0]}), which can execute code when loaded.",
            remedy="Convert them to safetensors: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...).",
        )
    raise DataError(f"{directory} has no weights: expected {_WEIGHT_FILES}.")


def _quantization_options() -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise UsageError("model.lora.quantize requires a GPU.", remedy="Set model.lora.quantize to false.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError("model.lora.quantize requires bitsandbytes.", remedy="pip install 'llmtrain[qlora]'")
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {"quantization_config": quantization, "device_map": {"": torch.cuda.current_device()}}


def _type_and_message(problem: Exception) -> str:
    return f"{type(problem).__name__}: {one_line(problem, 300)}"
