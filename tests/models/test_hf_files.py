"""Reading weights: what is refused, and what is not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")

from llmtrain.config.model import HfCausalLmSection
from llmtrain.errors import DataError
from llmtrain.models.hf.files import read_config, read_weights
from tiny_llama import make_model, tiny_gpt2

pytestmark = pytest.mark.hf

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def read(directory: Path) -> Any:
    section = HfCausalLmSection(name="hf_causal_lm", path=str(directory))
    return read_weights(directory, read_config(directory, section), section, "eager")


def add_tensors(directory: Path, **tensors: torch.Tensor) -> None:
    path = directory / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, {"format": "pt"})


def with_masks_of_gpt2(directory: Path) -> None:
    """As in the files of gpt2 and its kin on the hub."""
    tiny_gpt2().save_pretrained(directory)
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    add_tensors(directory, **masks)


def with_masks_of_gpt_neo(directory: Path) -> None:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
    config = GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 1]])
    GPTNeoForCausalLM(config).save_pretrained(directory)
    name = "transformer.h.0.attn.attention"
    add_tensors(directory, **{f"{name}.bias": torch.ones(1, 1, 8, 8), f"{name}.masked_bias": torch.tensor(-1e9)})


def with_rotary_frequencies(directory: Path) -> None:
    make_model(directory)
    add_tensors(directory, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})


def with_the_tied_output_layer(directory: Path) -> None:
    make_model(directory)
    embeddings = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    add_tensors(directory, **{"lm_head.weight": embeddings.clone()})


def with_extra_prediction_layers(directory: Path) -> None:
    """transformers itself ignores these of Qwen3-Next: they predict the token after the next one."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    config = Qwen3NextConfig(**TEXT, **experts, shared_expert_intermediate_size=16, layer_types=["full_attention"] * 2)
    Qwen3NextForCausalLM(config).save_pretrained(directory)
    add_tensors(directory, **{"mtp.layers.0.input_layernorm.weight": torch.ones(32)})


def with_a_vision_tower(directory: Path) -> None:
    """AutoModelForCausalLM loads the text model of Llama 3.2 Vision."""
    from transformers import MllamaConfig, MllamaForConditionalGeneration

    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 32,
        "intermediate_layers_indices": [0],
        "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
    }
    rope = {"rope_type": "default", "rope_theta": 1e4}
    text = {**TEXT, "cross_attention_layers": [1], "pad_token_id": 0, "rope_parameters": rope}
    MllamaForConditionalGeneration(MllamaConfig(vision_config=vision, text_config=text)).save_pretrained(directory)


@pytest.mark.parametrize(
    "make",
    [
        with_masks_of_gpt2,
        with_masks_of_gpt_neo,
        with_rotary_frequencies,
        with_the_tied_output_layer,
        with_extra_prediction_layers,
        with_a_vision_tower,
    ],
)
def test_tensors_that_a_text_model_does_not_need(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    tokens = torch.arange(8).view(1, 8)
    assert torch.isfinite(read(tmp_path)(tokens).logits).all()


def test_unused_layer_beside_a_vision_tower_is_refused(tmp_path: Path) -> None:
    with_a_vision_tower(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["text_config"] |= {"num_hidden_layers": 1, "cross_attention_layers": []}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(DataError, match=r"layers\.1\.") as refused:
        read(tmp_path)
    assert "vision" not in refused.value.what


@pytest.mark.parametrize("name", ["score.weight", "v_head.summary.bias", "model.layers.0.self_attn.q_proj.bias"])
def test_unused_tensor_is_refused_by_name(tmp_path: Path, name: str) -> None:
    make_model(tmp_path)
    add_tensors(tmp_path, **{name: torch.ones(32)})
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        read(tmp_path)
