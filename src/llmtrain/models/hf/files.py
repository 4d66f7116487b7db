"""Reading a model directory of transformers, strictly: what is missing or does not fit is an error, not a warning."""

import importlib.util
from pathlib import Path
from typing import Any

import torch

from llmtrain.config.model import HfCausalLmSection
from llmtrain.errors import DataError, UsageError

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
_KNOWN_PARTS = "model.safetensors, or model.safetensors.index.json with its parts"


def check_installed() -> None:
    missing = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"model.name hf_causal_lm needs {' and '.join(missing)}.", remedy="pip install 'llmtrain[hf]'."
        )


def quiet_libraries() -> None:
    """transformers draws progress bars and reports on the weights it read; what matters of it is checked here."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def is_tokenizer_folder(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def read_config(folder: Path, section: HfCausalLmSection) -> Any:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise DataError(
            f"{folder} is not a model directory: it has no config.json.",
            remedy="Give a directory that save_pretrained or `llmtrain fetch-model` wrote.",
        )
    quiet_libraries()
    try:
        return AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=section.trust_remote_code
        )
    except Exception as problem:  # of many kinds: unknown architectures, broken JSON, fields of a wrong type
        raise DataError(f"{folder / 'config.json'} cannot be used: {_first_lines(problem)}") from None


def read_weights(folder: Path, config: Any, section: HfCausalLmSection) -> Any:
    """The model with its weights, on the CPU (a quantised one on the GPU of this process)."""
    from transformers import AutoModelForCausalLM

    _check_weight_files(folder)
    quiet_libraries()
    options: dict[str, Any] = {
        "config": config,
        "dtype": getattr(torch, section.dtype),
        "attn_implementation": section.attention,
        "trust_remote_code": section.trust_remote_code,
        "use_safetensors": True,
        "local_files_only": True,
        "output_loading_info": True,
    }
    if section.lora and section.lora.quantize:
        options |= _four_bits()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(str(folder), **options)
    except Exception as problem:  # of many kinds
        is_attention = "attn" in str(problem) or "attention" in str(problem).lower()
        raise DataError(
            f"The model in {folder} cannot be loaded: {_first_lines(problem)}",
            remedy="Set model.attention to another one, such as eager." if is_attention else None,
        ) from None
    for name, what in (("missing_keys", "lacks weights"), ("mismatched_keys", "has weights of another shape")):
        if report.get(name):
            keys = sorted(map(str, report[name]))
            raise DataError(f"The model in {folder} {what}: {', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''}.")
    return model


def _check_weight_files(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise DataError(
            f"{folder} has its weights only as {pickles[0]}, a pickle, which can run code when loaded.",
            remedy="Convert it once: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...).",
        )
    raise DataError(f"{folder} has no weights ({_KNOWN_PARTS}).")


def _four_bits() -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise UsageError("model.lora.quantize needs a GPU.", remedy="Set model.lora.quantize to false.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError("model.lora.quantize needs bitsandbytes.", remedy="pip install 'llmtrain[qlora]'.")
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {"quantization_config": quantization, "device_map": {"": torch.cuda.current_device()}}


def _first_lines(problem: Exception) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
