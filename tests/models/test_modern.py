"""`gpt` with architecture modern: equivalence with Qwen3 and NanoChat of transformers, import, initialization."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from llmtrain.config.model import ModernGptSection
from llmtrain.errors import DataError, UsageError
from llmtrain.models.base import parameter_count
from llmtrain.models.gpt.adapter import GPTAdapter
from llmtrain.models.gpt.modern import ModernGPT, _SquaredReLU, init_parameter

CLASSES = {"swiglu": "Qwen3ForCausalLM", "relu2": "NanoChatForCausalLM"}
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {"vocab_size": 101},
    "untied-grouped": {"vocab_size": 101, "tie_embeddings": False, "n_kv_heads": 2, "d_ff": 56, "rope_theta": 500.0},
    "padded": {"vocab_size": 6399, "n_kv_heads": 1},
}


def make_adapter(**changes: Any) -> GPTAdapter:
    values = {"block_size": 24, "d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 101, **changes}
    return GPTAdapter(ModernGptSection(**values), tokenizer_vocab=values["vocab_size"])


def build(**changes: Any) -> ModernGPT:
    """A model after some training: norms are not 1, and output projections not 0."""
    torch.manual_seed(0)
    module = make_adapter(**changes).build()
    assert isinstance(module, ModernGPT)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return module.eval()


def random_tokens(vocab_size: int, batch: int = 3, length: int = 24) -> torch.Tensor:
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.hf
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mlp", CLASSES)
def test_export_equals_transformers(tmp_path: Path, mlp: str, shape: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")
    changes = {**SHAPES[shape], "mlp": mlp}
    vocab_size = changes["vocab_size"]
    adapter, module = make_adapter(**changes), build(**changes)
    adapter.export(module, tmp_path / "export", end_of_text=0)
    loading: tuple[Any, dict[str, Any]] = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", dtype=torch.float32, output_loading_info=True
    )
    reference, info = loading
    assert type(reference).__name__ == CLASSES[mlp]
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = random_tokens(vocab_size)
    with torch.no_grad():
        logits, expected = module(tokens)[..., :vocab_size], reference.eval()(tokens).logits
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-5
    prompt = [3, 1, 4]
    generated = reference.generate(
        torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert generated[0].tolist() == greedy(adapter, module, prompt, 16)


def greedy(adapter: GPTAdapter, module: nn.Module, prompt: list[int], count: int) -> list[int]:
    ids, next_logits = list(prompt), adapter.next_logits(module, adapter.context_length())
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(next_logits(ids).argmax()))
    return ids


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mlp", CLASSES)
def test_export_can_be_imported(tmp_path: Path, mlp: str, shape: str) -> None:
    changes = {**SHAPES[shape], "mlp": mlp}
    module = build(**changes)
    make_adapter(**changes).export(module, tmp_path / "export")
    if mlp == "relu2":
        changes["tie_embeddings"] = False  # the last norm is folded into the output layer
    torch.manual_seed(99)
    imported = make_adapter(**changes, init=str(tmp_path / "export")).build().eval()
    assert sum(parameter.isnan().sum() for parameter in imported.parameters()) == 0
    tokens = random_tokens(changes["vocab_size"])
    torch.testing.assert_close(imported(tokens), module(tokens), rtol=1e-4, atol=1e-5)


def test_export_has_the_data_type_asked_for(tmp_path: Path) -> None:
    make_adapter(mlp="relu2").export(build(mlp="relu2"), tmp_path / "export", dtype="bfloat16")
    assert {tensor.dtype for tensor in load_file(tmp_path / "export" / "model.safetensors").values()} == {
        torch.bfloat16
    }
    assert json.loads((tmp_path / "export" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("exported", "wanted", "field"),
    [
        ({"mlp": "swiglu"}, {"mlp": "relu2"}, "qwen3"),
        ({"mlp": "relu2"}, {"mlp": "relu2"}, "tie_word_embeddings"),
        ({"mlp": "swiglu"}, {"mlp": "swiglu", "n_kv_heads": 2}, "num_key_value_heads"),
        ({"mlp": "swiglu"}, {"mlp": "swiglu", "rope_theta": 99.0}, "rope_theta"),
    ],
)
def test_import_of_another_shape_is_refused(
    tmp_path: Path, exported: dict[str, Any], wanted: dict[str, Any], field: str
) -> None:
    make_adapter(**exported).export(build(**exported), tmp_path / "export")
    with pytest.raises(DataError) as error:
        make_adapter(**wanted, init=str(tmp_path / "export")).build()
    assert field in error.value.what


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}, "rope_type linear"),
        ({"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type yarn"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta is 5.0"),
        ({"rms_norm_eps": 0.5}, "rms_norm_eps 0.5"),
        ({"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window True"),
    ],
)
def test_import_of_a_model_that_computes_something_else_is_refused(
    tmp_path: Path, change: dict[str, Any], word: str
) -> None:
    make_adapter(mlp="swiglu").export(build(mlp="swiglu"), tmp_path / "export")
    path = tmp_path / "export" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError) as error:
        make_adapter(mlp="swiglu", init=str(tmp_path / "export")).build()
    assert word in error.value.what


def test_import_may_have_another_context(tmp_path: Path) -> None:
    """Positions are no weights."""
    module = build(mlp="swiglu")
    make_adapter(mlp="swiglu").export(module, tmp_path / "export")
    longer = make_adapter(mlp="swiglu", init=str(tmp_path / "export"), block_size=48).build().eval()
    torch.testing.assert_close(longer(random_tokens(101)), module(random_tokens(101)), rtol=1e-4, atol=1e-5)


def test_import_of_another_format_names_the_fields_to_set(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    save_file({"wte.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError) as error:
        make_adapter(init=str(tmp_path)).build()
    assert error.value.remedy is not None
    assert "model.architecture to gpt2" in error.value.remedy


def test_import_of_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        make_adapter(init=str(tmp_path / "nothing")).build()
    assert str(tmp_path / "nothing") in error.value.what


@pytest.mark.parametrize("mlp", CLASSES)
def test_logits_do_not_depend_on_later_tokens(mlp: str) -> None:
    module, tokens = build(mlp=mlp), random_tokens(101)
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 101
    with torch.no_grad():
        before, after = module(tokens), module(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_positions_are_relative() -> None:
    """The last token's logits depend on distances only: the same text, one position later, after a token that cannot
    be seen, gives the same."""
    module = build(n_layers=1)
    tokens = random_tokens(101, batch=1, length=8)
    cos, sin = module.rotary_cos.clone(), module.rotary_sin.clone()
    with torch.no_grad():
        expected = module(tokens)
        module.rotary_cos.copy_(cos.roll(-3, dims=0))
        module.rotary_sin.copy_(sin.roll(-3, dims=0))
        shifted = module(tokens)
        module.rotary_cos.fill_(1.0)
        module.rotary_sin.fill_(0.0)
        without = module(tokens)
    torch.testing.assert_close(shifted, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(without, expected, rtol=1e-2)


# Initialization.


@pytest.mark.parametrize("mlp", CLASSES)
def test_each_parameter_can_be_initialized_alone(mlp: str) -> None:
    torch.manual_seed(7)
    module = make_adapter(mlp=mlp, tie_embeddings=False).build()
    torch.rand(3)
    for name, parameter in reversed(list(module.named_parameters())):
        alone = torch.full_like(parameter, math.nan)
        init_parameter(name, alone, seed=7)
        assert torch.equal(alone, parameter), name


def test_initialization_depends_on_seed_and_name() -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return dict(make_adapter().build().named_parameters())

    first, second = weights(1), weights(2)
    assert not torch.equal(first["wte.weight"], second["wte.weight"])
    assert not torch.equal(first["h.0.attn.qkv.weight"], first["h.1.attn.qkv.weight"])
    assert all(torch.equal(first[name], tensor) for name, tensor in weights(1).items())


@pytest.mark.parametrize("mlp", CLASSES)
def test_blocks_are_the_identity_at_first(mlp: str) -> None:
    torch.manual_seed(1)
    module = make_adapter(mlp=mlp).build()
    assert isinstance(module, ModernGPT)
    x = torch.randn(2, 24, 32)
    assert torch.equal(module.h[0](x, (module.rotary_cos, module.rotary_sin)), x)
    tokens = random_tokens(101)
    loss = F.cross_entropy(module(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(101), abs=0.05)


def test_module_can_be_built_without_data() -> None:
    with torch.device("meta"):
        module = make_adapter().build_empty()
    assert parameter_count(module) == parameter_count(build())


# What the trainer reads from it.


def test_head_applied_to_hidden_states_gives_logits() -> None:
    module, tokens = build(vocab_size=6399), random_tokens(6399)
    logits = F.linear(module.hidden_states(tokens), module.head_weight, module.padding_bias)
    assert torch.equal(logits, module(tokens))
    assert logits.shape[-1] == 6400
    assert bool((logits[..., 6399:] == -math.inf).all())


def test_matrix_sections_cover_fused_matrices() -> None:
    adapter = make_adapter(mlp="swiglu", n_kv_heads=2, d_ff=48)
    module = adapter.build()
    sections = adapter.matrix_sections(module)
    assert sections["h.1.attn.qkv.weight"] == [32, 16, 16]
    assert sections["h.0.mlp.gate_up.weight"] == [48, 48]
    assert len(sections) == 4
    parameters = dict(module.named_parameters())
    assert all(len(parameters[name]) == sum(rows) for name, rows in sections.items())
    relu2 = make_adapter(mlp="relu2")
    assert list(relu2.matrix_sections(relu2.build())) == ["h.0.attn.qkv.weight", "h.1.attn.qkv.weight"]


def test_size_124m_has_about_124_million_parameters() -> None:
    for mlp in CLASSES:
        with torch.device("meta"):
            module = GPTAdapter(ModernGptSection(size="124m", mlp=mlp, block_size=1024), 50257).build_empty()
        assert parameter_count(module) == pytest.approx(124e6, rel=0.01)


def test_flops_are_about_six_per_weight() -> None:
    adapter = make_adapter(tie_embeddings=False)
    module = adapter.build()
    weights = parameter_count(module) - 101 * 32
    assert adapter.flops_per_token(module) == 6 * weights + 12 * 2 * 32 * 24


def test_no_random_numbers_are_drawn_in_training() -> None:
    adapter = make_adapter()
    module, tokens = adapter.build().train(), random_tokens(101)
    assert not adapter.uses_dropout
    assert torch.equal(module(tokens), module(tokens))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_gradient_of_squared_relu_from_its_result(dtype: torch.dtype, tolerance: float) -> None:
    """A GPU computes it from the result, to save memory."""
    x = torch.cat([torch.linspace(-3, 3, 301), torch.tensor([0.0, 1e-30, -1e-30, 1e10])]).to(dtype).requires_grad_()
    upstream = torch.linspace(-2, 2, len(x)).to(dtype)
    expected, found = F.relu(x).square(), _SquaredReLU.apply(x)
    assert torch.equal(found, expected)
    (right,), (ours,) = (torch.autograd.grad(result, x, upstream) for result in (expected, found))
    torch.testing.assert_close(ours, right, rtol=tolerance, atol=1e-15)
