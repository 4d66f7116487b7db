"""Writes a GGUF file from an export for transformers, tensor by tensor."""

import errno
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from llmtrain.core.files import read_json
from llmtrain.core.install import install_command
from llmtrain.data.tokenizers.base import TOKENIZER_FILE
from llmtrain.errors import UsageError
from llmtrain.inference.gguf.shapes import SHAPES, shape_problem
from llmtrain.inference.gguf.vocabulary import (
    READ_BY_LLAMA_CPP_ONLY,
    Layout,
    Vocabulary,
    pre_tokenizer,
    read_vocabulary,
    vocabulary_problem,
)
from llmtrain.inference.load import LoadedModel
from llmtrain.models.hf.lora import has_adapter

GGUF_FILE = "model.gguf"
GGUF_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "q8_0"}
"""Data types as GGUF calls them -> as we do."""
_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
_FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
_Q8_BLOCK = 32
_POSITIONS = "position_embd.weight"


def gguf_problem(loaded: LoadedModel) -> str | None:
    """Why the model, with its adapters merged, cannot become a GGUF file; None if it can."""
    problem = shape_problem(loaded.adapter.export_config())
    if problem is None:
        problem = vocabulary_problem(_tokenizer_layout(loaded))
    if problem is None and loaded.tokenizer.end_of_text is None:
        problem = "its tokenizer has no token for the end of a text"
    return problem


def is_read_by_transformers(loaded: LoadedModel) -> bool:
    """Whether transformers gets the right token ids from the GGUF file."""
    return pre_tokenizer(_tokenizer_layout(loaded)) not in READ_BY_LLAMA_CPP_ONLY


def _tokenizer_layout(loaded: LoadedModel) -> Layout:
    with tempfile.TemporaryDirectory() as folder:
        loaded.save_tokenizer(Path(folder))
        layout: Layout = read_json(Path(folder) / TOKENIZER_FILE)
        return layout


def check_gguf(loaded: LoadedModel, merge: bool) -> None:
    """Refuse what cannot be written, before anything is."""
    problem = gguf_problem(loaded)
    if problem:
        raise UsageError(
            f"--format gguf: {loaded.label} cannot become a GGUF file: {problem}.",
            remedy=f"Leave out --format for a directory that transformers loads. GGUF is written for the model types "
            f"{', '.join(SHAPES)} with the tokenizers byte and gpt2, those of `llmtrain tokenizer train`, and those of "
            "Llama 3, Qwen and SmolLM.",
        )
    if has_adapter(loaded.module) and not merge:
        raise UsageError(
            "--format gguf writes whole models, and this is an adapter.", remedy="Add --merge to merge it first."
        )
    if importlib.util.find_spec("gguf") is None:
        raise UsageError("--format gguf requires gguf, which is not installed.", remedy=install_command("gguf"))


def write_gguf(files: Path, path: Path, loaded: LoadedModel, dtype: str) -> None:
    """`files`: directory of the export for transformers."""
    import gguf

    config = json.loads((files / "config.json").read_text())
    shape = SHAPES[config["model_type"]]
    writer = gguf.GGUFWriter(path, config["model_type"])
    writer.add_name(Path(loaded.label).name)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[dtype]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    shape.add_metadata(writer, config)
    adds_bos = not loaded.is_trained_from_scratch and bool(loaded.tokenizer.prefix_ids())
    _add_vocabulary(writer, read_vocabulary(files, config["vocab_size"], adds_bos))

    layers = config.get("num_hidden_layers") or config["n_layer"]
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == config["model_type"])
    names = gguf.get_tensor_name_map(architecture, layers)
    types = {}
    for name, tensor in _tensors(files):
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new, f"gguf has no name for {name}"
        rows = shape.convert(name, tensor, config)
        types[name] = _tensor_type(new, rows, dtype)
        block, size = gguf.GGML_QUANT_SIZES[types[name]]
        writer.add_tensor_info(new, rows.shape, None, rows.numel() // block * size, types[name])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in _tensors(files):
            rows = shape.convert(name, tensor, config).float().contiguous()
            writer.write_tensor_data(gguf.quants.quantize(rows.numpy(), types[name]))
    except OSError as problem:
        if problem.errno is None:  # numpy reports a full disk without the number of the error
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        raise
    finally:
        writer.close()


def _tensors(files: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors by name, one in memory at a time."""
    from safetensors import safe_open

    for path in sorted(files.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                yield name, file.get_tensor(name)


def _tensor_type(name: str, tensor: torch.Tensor, dtype: str) -> Any:
    """As llama.cpp's own converter: norms, biases and positions stay float32, and rows that are not whole blocks
    float16."""
    import gguf

    if tensor.dim() < 2 or name == _POSITIONS:
        dtype = "float32"
    elif dtype == "q8_0" and tensor.shape[-1] % _Q8_BLOCK:
        dtype = "float16"
    return gguf.GGMLQuantizationType[_TYPES[dtype]]


def round_like_gguf(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """A tensor as float32 after it was in a GGUF file; `name` in the model in memory."""
    import gguf

    is_positions = name.endswith("wpe.weight")
    kind = _tensor_type(_POSITIONS if is_positions else name, tensor, dtype)
    stored = gguf.quants.quantize(tensor.float().contiguous().cpu().numpy(), kind)
    return torch.from_numpy(gguf.quants.dequantize(stored, kind))


def _add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    add_id = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "pad": writer.add_pad_token_id,
        "unk": writer.add_unk_token_id,
    }
    for name, token in vocabulary.special.items():
        add_id[name](token)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)
