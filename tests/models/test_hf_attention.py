"""The choice of model.attention auto, and the mask of packed examples."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")


from llmtrain.compat.numerics import Numerics
from llmtrain.config.model import HfCausalLmSection
from llmtrain.models.hf import causal_lm
from llmtrain.models.hf.attention import best_attention, default_attention, example_mask, has_one_mask, without_flex
from llmtrain.models.hf.causal_lm import CausalLM, HFCausalLMAdapter
from tiny_llama import make_model, tiny_llama

pytestmark = pytest.mark.hf
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def llama_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**changes)


@pytest.mark.parametrize(
    ("device", "is_packed", "expected"),
    [(CPU, True, "sdpa"), (CPU, False, "sdpa"), (CUDA, True, "flex_attention"), (CUDA, False, "sdpa")],
)
def test_auto_depends_on_device_and_packing(device: torch.device, is_packed: bool, expected: str) -> None:
    assert best_attention(llama_config(), device, is_packed) == expected


def test_auto_takes_what_the_architecture_has() -> None:
    from transformers import BloomConfig

    assert default_attention(BloomConfig()) == "eager"
    assert best_attention(BloomConfig(), CUDA, is_packed=True) == "eager"
    assert best_attention(llama_config(attention_dropout=0.1), CUDA, is_packed=True) == "sdpa"


@pytest.mark.parametrize(("attention", "expected"), [("auto", "sdpa"), ("eager", "eager")])
def test_adapter_on_a_cpu(tmp_path: Path, attention: Any, expected: str) -> None:
    section = HfCausalLmSection(path=str(make_model(tmp_path)), block_size=16, attention=attention)
    adapter = HFCausalLMAdapter(section, 100)
    adapter.prepare_for(CPU, is_packed=True)
    module: Any = adapter.build()
    assert module.base.config._attn_implementation == expected


def test_config_keeps_a_given_attention_on_a_gpu(tmp_path: Path) -> None:
    section = HfCausalLmSection(path=str(make_model(tmp_path)), block_size=16, attention="sdpa")
    adapter = HFCausalLMAdapter(section, 100)
    adapter.prepare_for(CUDA, is_packed=True)
    assert adapter.attention == "sdpa"


def test_sliding_windows_need_more_than_one_mask() -> None:
    from transformers import MistralConfig

    assert has_one_mask(llama_config())
    assert not has_one_mask(MistralConfig(sliding_window=8))


def test_mask_lets_examples_see_only_themselves() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]])
    visible = torch.zeros(2, 6, 6, dtype=torch.bool)
    for row, starts in enumerate(([0, 0, 0, 3, 3, 5], [0, 0, 2, 2, 2, 2])):
        for query, start in enumerate(starts):
            visible[row, query, start : query + 1] = True
    mask = example_mask(positions)
    indexes = torch.meshgrid(torch.arange(2), torch.arange(6), torch.arange(6), indexing="ij")
    assert torch.equal(mask.mask_mod(indexes[0], torch.tensor(0), *indexes[1:]), visible)


def test_flex_attention_equals_sdpa_and_builds_one_mask_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(causal_lm, "example_mask", lambda positions: made.append(1) or example_mask(positions))
    tokens = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(9), torch.arange(7)]).expand(2, -1)
    flex, sdpa = (
        CausalLM(tiny_llama(num_hidden_layers=3, attn_implementation=name), Numerics()).eval()
        for name in ("flex_attention", "sdpa")
    )
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(
            flex(tokens, positions=positions), sdpa(tokens, positions=positions), rtol=1e-4, atol=1e-4
        )
    assert made == [1]


def test_generation_does_not_use_flex_attention() -> None:
    config = llama_config()
    config._attn_implementation = "flex_attention"
    with without_flex(config):
        assert config._attn_implementation == "sdpa"
    assert config._attn_implementation == "flex_attention"
