"""The shapes of a Hugging Face model from config.json and the headers of its weight files. Without torch."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmtrain.config.model import HfCausalLmSection, LoraSection
from llmtrain.config.schema import Config
from llmtrain.core.files import read_json
from llmtrain.errors import LlmtrainError
from llmtrain.hub.find import find_model_config
from llmtrain.plan.memory_value import LOGIT_CAPS, QUANTIZED_BYTES, WeightSizes
from llmtrain.plan.shapes import CannotTell, ModelShapes, StepShapes
from llmtrain.plan.states import factored_numbers
from llmtrain.plan.target import ModelSize
from llmtrain.runs.json_values import integer

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""model_type in config.json of architectures whose blocks compute the same as Llama's."""
WITH_QK_NORM = ("qwen3",)
WITH_QKV_BIAS = ("qwen2",)
_HEADER_LIMIT = 1 << 27
"""Bytes; the header of a real file has less than 1 MB."""
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")

Shapes = dict[str, tuple[int, ...]]


def read_hf_shapes(config: Config, section: HfCausalLmSection) -> ModelShapes:
    try:
        directory = find_model_config(section.path, section.revision, local_files_only=True)
    except LlmtrainError:
        raise CannotTell(f"model {section.path} is not on this machine") from None
    values = read_json(directory / "config.json")
    if not isinstance(values, dict):
        raise CannotTell(f"{directory} has no config.json that can be read")
    if "text_config" in values:
        raise CannotTell(f"model_type {values.get('model_type')} has parts besides its language model")
    shapes = header_shapes(directory) or _shapes_of_config(values)
    if not shapes:
        raise CannotTell(
            f"{directory} has no weights, and the shapes of model_type {values.get('model_type')} are not known "
            "without them"
        )
    if values.get("tie_word_embeddings") and any("embed" in name for name in shapes):
        shapes.pop("lm_head.weight", None)
    blocks = _blocks(shapes)
    adapters = dict(_adapters(section.lora, shapes)) if section.lora else {}
    weights = _weight_sizes(config, section, shapes, blocks, adapters)
    trained = weights.trained_bytes // weights.bytes_per_trained
    return ModelShapes(
        weights=weights,
        size=ModelSize(
            parameters=weights.parameters,
            trained=trained,
            flops_per_token=_flops(config, weights.parameters, trained, values, shapes),
            layers=len(blocks) or 1,
            vocab_size=integer(values.get("vocab_size")) or None,
        ),
        step=_step(values, shapes, blocks, adapters),
        step_unknown=f"the activations of model_type {values.get('model_type')} are not in the formula",
    )


def header_shapes(directory: Path) -> Shapes:
    """Of all tensors in the safetensors files of a directory; empty if one cannot be read."""
    names = {"model.safetensors"}
    if not (directory / "model.safetensors").is_file():
        index = read_json(directory / "model.safetensors.index.json")
        shards = index.get("weight_map") if isinstance(index, dict) else None
        names = {str(name) for name in shards.values()} if isinstance(shards, dict) else set()
    shapes: Shapes = {}
    try:
        for name in sorted(names):
            for tensor, entry in _header(directory / name).items():
                if tensor != "__metadata__":
                    shapes[tensor] = tuple(int(size) for size in entry["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return shapes


def _header(path: Path) -> dict[str, Any]:
    """A safetensors file begins with the length of a JSON document, and the document."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _HEADER_LIMIT:
            raise ValueError("not a safetensors file")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("not a safetensors file")
    return header


def _shapes_of_config(values: dict[str, Any]) -> Shapes:
    """Of a Llama-like model without weight files; empty for others."""
    sizes = _llama_sizes(values)
    if sizes is None:
        return {}
    width, heads, kv_heads, head_dim, d_ff, layers, vocab_size = sizes
    kind = values["model_type"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab_size, width), "model.norm.weight": (width,)}
    if not values.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab_size, width)
    rows = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, size in rows.items():
            shapes[f"{prefix}.self_attn.{name}.weight"] = (size, width)
            if kind in WITH_QKV_BIAS:
                shapes[f"{prefix}.self_attn.{name}.bias"] = (size,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (width, heads * head_dim)
        if kind in WITH_QK_NORM:
            for name in ("q_norm", "k_norm"):
                shapes[f"{prefix}.self_attn.{name}.weight"] = (head_dim,)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{prefix}.mlp.{name}.weight"] = (d_ff, width)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (width, d_ff)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (width,)
    return shapes


def _llama_sizes(values: dict[str, Any]) -> tuple[int, int, int, int, int, int, int] | None:
    """Width, heads, key and value heads, size of a head, width of the feed-forward layer, layers, vocabulary."""
    if values.get("model_type") not in LLAMA_LIKE:
        return None
    try:
        width = int(values["hidden_size"])
        heads = int(values["num_attention_heads"])
        kv_heads = int(values.get("num_key_value_heads") or heads)
        head_dim = int(values.get("head_dim") or (128 if values["model_type"] in WITH_QK_NORM else width // heads))
        sizes = (
            *(width, heads, kv_heads, head_dim, int(values["intermediate_size"])),
            *(int(values["num_hidden_layers"]), int(values["vocab_size"])),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    return sizes if min(sizes) > 0 else None


def _blocks(shapes: Shapes) -> dict[int, Shapes]:
    """Block number -> its tensors."""
    blocks: dict[int, Shapes] = {}
    for name, shape in shapes.items():
        match = _BLOCK.search(name)
        if match:
            blocks.setdefault(int(match[1]), {})[name] = shape
    return blocks


def _adapters(lora: LoraSection, shapes: Shapes) -> Iterator[tuple[str, int]]:
    """Weight of a linear layer -> weights of its adapter."""
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if len(shape) != 2 or layer == name or "embed" in name:
            continue
        if lora.target_modules:
            is_target = any(f".{layer}".endswith(f".{target}") for target in lora.target_modules)
        else:
            is_target = _BLOCK.search(name) is not None
        if is_target:
            yield name, lora.rank * sum(shape) + (shape[0] if lora.dora else 0)


def _weight_sizes(
    config: Config, section: HfCausalLmSection, shapes: Shapes, blocks: dict[int, Shapes], adapters: dict[str, int]
) -> WeightSizes:
    base = sum(map(math.prod, shapes.values()))
    in_blocks = [sum(map(math.prod, block.values())) for block in blocks.values()]
    matrices = [math.prod(shape) for block in blocks.values() for shape in block.values() if len(shape) == 2]
    largest = max(map(math.prod, shapes.values()))
    if not section.lora:
        size = section.bytes_per_trained_weight
        return WeightSizes(
            parameters=base,
            weight_bytes=size * base,
            trained_bytes=size * base,
            bytes_per_trained=size,
            matrices=sum(matrices),
            largest_matrix=max(matrices, default=0),
            largest_trained_bytes=size * largest,
            outside=base - sum(in_blocks),
            largest_block=max(in_blocks, default=0),
            largest_trained_block=max(in_blocks, default=0),
            factored=factored_numbers(shapes.values()),
        )
    # Frozen weights are stored in the data type in which they are used.
    frozen = 2 if section.dtype == "bfloat16" or config.trainer.computes_in_bf16 else 4
    trained = sum(adapters.values())
    weight_bytes = frozen * base + 4 * trained
    if section.lora.quantize:
        weight_bytes -= int((frozen - QUANTIZED_BYTES) * sum(math.prod(shapes[name]) for name in adapters))
    per_block = trained // max(1, len(blocks))
    return WeightSizes(
        parameters=base + trained,
        weight_bytes=weight_bytes,
        trained_bytes=4 * trained,
        bytes_per_trained=4,
        matrices=0,
        largest_matrix=0,
        largest_trained_bytes=4 * max(adapters.values(), default=0),
        outside=base - sum(in_blocks),
        largest_block=max(in_blocks, default=0) + per_block,
        largest_trained_block=per_block,
        factored=sum(sum(shapes[name]) + 2 * section.lora.rank for name in adapters),
    )


def _flops(config: Config, parameters: int, trained: int, values: dict[str, Any], shapes: Shapes) -> float:
    """4 per frozen weight and 6 per trained one, and attention over the context."""
    layers = values.get("num_hidden_layers")
    width = values.get("hidden_size")
    attention = 0.0
    if isinstance(layers, int) and isinstance(width, int):
        attention = 12.0 * layers * width * config.model.block_size
    looked_up = 0  # an embedding that is not tied to the output layer is not multiplied
    if "lm_head.weight" in shapes:
        looked_up = math.prod(shapes["lm_head.weight"])
    if parameters == trained:
        return 6.0 * (trained - looked_up) + attention
    return 4.0 * (parameters - trained - looked_up) + 6.0 * trained + attention


def _step(
    values: dict[str, Any], shapes: Shapes, blocks: dict[int, Shapes], adapters: dict[str, int]
) -> StepShapes | None:
    sizes = _llama_sizes(values)
    if sizes is None or not blocks:
        return None
    width, heads, kv_heads, head_dim, d_ff, layers, vocab_size = sizes
    ranks = 0
    for name, count in adapters.items():
        ranks += count // sum(shapes[name])
    block = blocks[min(blocks)]
    return StepShapes(
        layers=layers,
        width=width,
        heads=heads,
        query_width=heads * head_dim,
        kv_width=kv_heads * head_dim,
        d_ff=d_ff,
        mlp="swiglu",
        vocab_size=vocab_size,
        block_matrices=sum(math.prod(shape) for shape in block.values() if len(shape) == 2),
        normed_queries=1 if values["model_type"] in WITH_QK_NORM else 0,
        is_hf=True,
        has_plain_output=not any(values.get(name) for name in LOGIT_CAPS),
        lora_ranks=-(-ranks // layers),
    )
