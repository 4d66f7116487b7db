"""Reading a transformers model directory, strictly: missing, mismatched or unused weights are errors, not warnings."""

import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from llmtrain.config.model import HfCausalLmSection
from llmtrain.core.files import read_json
from llmtrain.core.text import one_line
from llmtrain.errors import DataError, LlmtrainError, UsageError
from llmtrain.hub.find import find_model
from llmtrain.models.hf.installed import check_quantization_installed

Shape = tuple[int, ...]

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
_WEIGHT_FILES = "model.safetensors, or model.safetensors.index.json and its shards"
_MANY_LAYERS = 1_000
"""More than any model has; transformers builds as many within seconds."""
_OVERSIZE = 2
"""A model with this many times the numbers of its weight files is refused before memory is allocated for it. Not one:
some architectures compute a few weights that are not stored."""
# Causal masks and positions: earlier versions of transformers and other libraries stored them beside the weights.
_CONSTANTS = re.compile(
    r"\b(self_)?(attn|attention)\.(bias|masked_bias|causal_mask|embed_positions)$"
    r"|inv_freq$|(cos|sin)_cached$|\bposition_ids$|_extra_state$"
)
_TEXT_PART = re.compile(r"\b(language|text)_model\.")


def find_directory(config: HfCausalLmSection) -> Path:
    """The directory of model.path, downloaded if it is a name on the hub."""
    is_code_pinned = Path(config.path).expanduser().is_dir() or re.fullmatch(r"[0-9a-f]{40}", config.revision or "")
    if config.trust_remote_code and not is_code_pinned:
        raise UsageError(
            "model.trust_remote_code runs code from the hub, so model.revision must be a commit hash, got "
            f"{json.dumps(config.revision)}.",
            remedy="Set model.revision to the 40 digits of a commit you have reviewed, or model.path to a directory.",
        )
    return find_model(config.path, config.revision, config.local_files_only, code=config.trust_remote_code)


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
        config = AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=section.trust_remote_code
        )
    except Exception as problem:  # transformers raises many types: unknown architecture, broken JSON, bad fields
        raise DataError(f"Cannot load {directory / 'config.json'}: {_type_and_message(problem)}") from None
    _check_layers(directory, config)
    return config


def vocab_size_of(config: Any, directory: Path) -> int:
    size = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(size, int):
        raise DataError(
            f"{directory} is not a language model: its config.json ({config.model_type}) has no vocab_size."
        )
    return size


def _check_layers(directory: Path, config: Any) -> None:
    """Refuse a model without layers, and one that transformers would build for hours."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    most = max(_MANY_LAYERS, len(weight_shapes(directory) or ()))  # a layer has a tensor at least
    if isinstance(layers, int) and not 1 <= layers <= most:
        raise DataError(
            f"{directory / 'config.json'}: num_hidden_layers must be from 1 to {most:,}, got {layers:,}.",
            remedy="Use the config.json that belongs to these weights.",
        )


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
        "ignore_mismatched_sizes": True,  # else it raises, and the names are only in a log message
    }
    if section.lora and section.lora.quantize:
        options |= _quantization_options()
    try:
        _check_size(directory, config, section.trust_remote_code)
        model, report = AutoModelForCausalLM.from_pretrained(str(directory), **options)
    except LlmtrainError:
        raise
    except Exception as problem:  # transformers raises many types
        is_attention = "attn" in str(problem) or "attention" in str(problem).lower()
        raise DataError(
            f"Cannot load the model in {directory}: {_type_and_message(problem)}",
            remedy="Set model.attention to eager." if is_attention else None,
        ) from None
    if report["mismatched_keys"]:
        raise _wrong_shapes(directory, report["mismatched_keys"])
    if report["missing_keys"]:
        raise DataError(f"The model in {directory} has missing weights: {_some(report['missing_keys'])}.")
    unused = _unused(model, config, report["unexpected_keys"])
    if unused:
        raise DataError(
            f"The model in {directory} has weights that its config.json does not use: {_some(unused)}.",
            remedy="Use the config.json that belongs to these weights. To train without them, save the model again: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...).",
        )
    return model


def _check_size(directory: Path, config: Any, trust_remote_code: bool) -> None:
    """Refuse a model that is much larger than its weight files: transformers would allocate and initialize the
    difference before it reports it."""
    from transformers import AutoModelForCausalLM

    stored = weight_shapes(directory)
    if stored is None or getattr(config, "quantization_config", None):  # which packs several weights into a number
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count <= _OVERSIZE * count_numbers(stored):
        return
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    common = expected.keys() & stored.keys()
    wrong = [(name, stored[name], expected[name]) for name in common if stored[name] != expected[name]]
    if wrong:
        raise _wrong_shapes(directory, wrong)
    raise DataError(
        f"The model in {directory} has missing weights: its files have {count_numbers(stored):,} numbers, and its "
        f"config.json describes a model of {count:,}."
    )


def _wrong_shapes(directory: Path, wrong: Iterable[tuple[str, Shape, Shape]]) -> DataError:
    """`wrong`: name, shape in the weight files, and shape in the model."""
    rows = [f"{name} is {_written(stored)}, config.json says {_written(expected)}" for name, stored, expected in wrong]
    return DataError(
        f"The model in {directory} has weights of another shape than its config.json: {_some(rows, '; ')}.",
        remedy="Use the config.json that belongs to these weights.",
    )


def _written(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "a single number"


def _some(names: Iterable[str], separator: str = ", ") -> str:
    """The first five, and how many more there are."""
    ordered = sorted(names)
    shown = ordered[:5]
    if len(ordered) > 5:
        shown.append(f"and {len(ordered) - 5} more")
    return separator.join(shown)


def _unused(model: Any, config: Any, unexpected: Iterable[str]) -> list[str]:
    """Tensors that transformers did not load although the config should have had a place for them."""
    names = [name for name in unexpected if not _CONSTANTS.search(name)]
    if type(model.config) is type(config):
        return names
    # The text model of a multimodal one: transformers leaves out other parts as a whole, such as a vision tower.
    modules = dict(model.named_modules())
    whole = ("", "model")
    return [name for name in names if _innermost(modules, _TEXT_PART.sub("", name)) not in whole]


def _innermost(modules: dict[str, Any], name: str) -> str:
    """The longest prefix of a tensor's name that is the name of a module."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def weight_shapes(directory: Path) -> dict[str, Shape] | None:
    """Shapes of the tensors that transformers would load, from the headers of their files; None if they cannot be
    read."""
    from safetensors import SafetensorError, safe_open

    names = {"model.safetensors"}
    if not (directory / "model.safetensors").is_file():
        index = read_json(directory / "model.safetensors.index.json")
        shards = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(shards, dict):
            return None
        names = {str(name) for name in shards.values()}
    shapes: dict[str, Shape] = {}
    try:
        for name in names:
            with safe_open(directory / name, framework="pt") as file:
                shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):  # building the model reports it
        return None
    return shapes or None


def count_numbers(shapes: dict[str, Shape]) -> int:
    return sum(map(math.prod, shapes.values()))


def _check_weight_files(directory: Path) -> None:
    weights = sorted(directory.glob("*.safetensors"))
    for path in weights:
        if path.exists() and not os.access(path, os.R_OK):
            # safetensors reports it as missing, and saves files that only their owner can read.
            raise DataError(
                f"Not allowed to read {path}: it is readable by user id {path.stat().st_uid} and this process has "
                f"{os.geteuid()}.",
                remedy=f"As its owner: chmod a+r {path.parent}/*",
            )
    if weights:
        return
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise DataError(
            f"{directory} has only pickled weights ({pickles[0]}), which can execute code when loaded.",
            remedy="Convert them to safetensors: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...).",
        )
    raise DataError(f"{directory} has no weights: expected {_WEIGHT_FILES}.")


def _quantization_options() -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise UsageError("model.lora.quantize requires a GPU.", remedy="Set model.lora.quantize to false.")
    check_quantization_installed()
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
