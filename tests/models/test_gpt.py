"""`gpt`: equivalence with GPT-2 of transformers, import and export, causality, initialization."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.compat.numerics import Numerics
from llmtrain.config.model import GptSection
from llmtrain.errors import DataError, UsageError
from llmtrain.models.base import parameter_count
from llmtrain.models.gpt.adapter import GPTAdapter
from llmtrain.models.gpt.model import GPT
from llmtrain.models.sizes import padded_vocab_size

SHAPES = {
    "tied": {"vocab_size": 101},
    "untied": {"vocab_size": 101, "tie_embeddings": False},
    "d_ff": {"vocab_size": 101, "d_ff": 56},
    "padded": {"vocab_size": 6399},
    "padded-untied": {"vocab_size": 6399, "tie_embeddings": False},
    "deep": {"vocab_size": 64, "n_layers": 6, "n_heads": 8, "d_model": 64},
}


def make_adapter(**changes: Any) -> GPTAdapter:
    values = {"block_size": 24, "d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 101, **changes}
    return GPTAdapter(GptSection(**values), tokenizer_vocab=values["vocab_size"])


def build(seed: int = 0, scale: float = 1.0, **changes: Any) -> GPT:
    """A model; a larger scale than GPT-2's initialization makes differences of logits visible."""
    torch.manual_seed(seed)
    module = make_adapter(**changes).build()
    assert isinstance(module, GPT)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(scale)
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return module.eval()


def random_tokens(vocab_size: int, batch: int = 3, length: int = 24) -> torch.Tensor:
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.hf
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(tmp_path: Path, shape: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")
    changes = SHAPES[shape]
    module = build(scale=2.0, **changes)
    make_adapter(**changes).export(module, tmp_path / "export")
    reference = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    assert reference.config.vocab_size == changes["vocab_size"]
    tokens = random_tokens(changes["vocab_size"])
    with torch.no_grad():
        logits, expected = module(tokens)[..., : changes["vocab_size"]], reference(tokens).logits
    assert logits.shape == expected.shape == (3, 24, changes["vocab_size"])
    assert expected.std() > 0.1, "logits close to 0 would prove nothing"
    assert (logits - expected).abs().max() < 1e-5


@pytest.mark.hf
@pytest.mark.parametrize("shape", ["tied", "untied", "padded"])
def test_loss_and_gradients_equal_transformers(tmp_path: Path, shape: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")
    changes = SHAPES[shape]
    module = build(scale=4.0, **changes)
    make_adapter(**changes).export(module, tmp_path / "export")
    reference = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    tokens = random_tokens(changes["vocab_size"], length=25)[:, :24]
    loss = make_adapter(**changes).loss(module, tokens[:, :-1], tokens[:, 1:].contiguous()) / (3 * 23)
    expected = reference(tokens, labels=tokens).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    grad = module.h[1].attn.c_attn.weight.grad
    assert grad is not None
    torch.testing.assert_close(grad.t(), reference.transformer.h[1].attn.c_attn.weight.grad, rtol=1e-4, atol=1e-6)
    embedding_grad = module.wte.weight.grad
    assert embedding_grad is not None
    torch.testing.assert_close(
        embedding_grad[: changes["vocab_size"]], reference.transformer.wte.weight.grad, rtol=1e-4, atol=1e-6
    )
    assert embedding_grad[changes["vocab_size"] :].abs().sum() == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_export_and_import_round_trip(tmp_path: Path, shape: str) -> None:
    changes = SHAPES[shape]
    module = build(**changes)
    make_adapter(**changes).export(module, tmp_path / "export")
    torch.manual_seed(99)
    imported = make_adapter(**changes, init=str(tmp_path / "export")).build().state_dict()
    state = module.state_dict()
    assert imported.keys() == state.keys()
    for name, tensor in state.items():
        size = changes["vocab_size"] if name in ("wte.weight", "lm_head.weight") else len(tensor)
        assert torch.equal(imported[name][:size], tensor[:size]), name
        assert imported[name].shape == tensor.shape, name
    tokens = random_tokens(changes["vocab_size"])
    imported_module = make_adapter(**changes, init=str(tmp_path / "export")).build().eval()
    assert torch.equal(imported_module(tokens), module(tokens))


@pytest.mark.hf
@pytest.mark.parametrize("tied", [True, False])
def test_import_of_a_transformers_model(tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=101, n_positions=24, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=tied
    )
    reference = transformers.GPT2LMHeadModel(config).eval()
    reference.save_pretrained(tmp_path / "reference")
    module = make_adapter(tie_embeddings=tied, init=str(tmp_path / "reference")).build().eval()
    tokens = random_tokens(101)
    with torch.no_grad():
        assert (module(tokens) - reference(tokens).logits).abs().max() < 1e-5


def test_import_of_another_shape_is_refused(tmp_path: Path) -> None:
    make_adapter().export(build(), tmp_path / "export")
    with pytest.raises(DataError, match=r"n_embd.* 32 .* 64"):
        make_adapter(d_model=64, init=str(tmp_path / "export")).build()
    with pytest.raises(DataError, match=r"tie_word_embeddings.* True .* False"):
        make_adapter(tie_embeddings=False, init=str(tmp_path / "export")).build()
    with pytest.raises(UsageError, match=r"model\.init.*nothing"):
        make_adapter(init=str(tmp_path / "nothing")).build()


def test_attention_is_causal() -> None:
    module = build(scale=4.0)
    tokens = random_tokens(101, batch=1)
    before = module(tokens)
    for position in (1, 10, 23):
        changed = tokens.clone()
        changed[0, position] = (changed[0, position] + 1) % 101
        after = module(changed)
        assert torch.equal(after[0, :position], before[0, :position])
        assert not torch.allclose(after[0, position:], before[0, position:])


def test_logits_do_not_depend_on_later_tokens() -> None:
    module = build(scale=4.0)
    tokens = random_tokens(101)
    torch.testing.assert_close(module(tokens[:, :7]), module(tokens)[:, :7], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [65, 1000, 6399])
def test_initial_loss_is_log_vocab_size(vocab_size: int) -> None:
    torch.manual_seed(0)
    adapter = make_adapter(vocab_size=vocab_size, d_model=64)
    module = adapter.build().eval()
    tokens = random_tokens(vocab_size, batch=16)
    loss = adapter.loss(module, tokens, random_tokens(vocab_size, batch=17)[1:]).item() / tokens.numel()
    assert loss == pytest.approx(math.log(vocab_size), abs=0.05)


def test_initial_weights_follow_gpt2() -> None:
    torch.manual_seed(0)
    module = make_adapter(d_model=128, n_layers=8, vocab_size=640).build()
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0, name
        elif ".ln_" in name or name.startswith("ln_f"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            std = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.1 * std, name


def test_dropout_is_active_in_training_only() -> None:
    module = build(dropout=0.5)
    tokens = random_tokens(101)
    assert torch.equal(module(tokens), module(tokens))
    module.train()
    assert not torch.equal(module(tokens), module(tokens))
    torch.manual_seed(5)
    first = module(tokens)
    torch.manual_seed(5)
    assert torch.equal(module(tokens), first)


def test_vocabulary_is_padded() -> None:
    assert padded_vocab_size(50257) == 50304
    assert padded_vocab_size(6399) == 6400
    assert padded_vocab_size(65) == 65
    assert padded_vocab_size(256) == 256
    module = build(vocab_size=6399)
    assert module.wte.weight.shape[0] == 6400
    logits = module(random_tokens(6399))
    assert logits[..., 6399:].exp().sum() == 0, "padding ids must never be predicted"
    assert logits[..., :6399].isfinite().all()
    assert "padding_bias" not in module.state_dict()


def test_tied_embeddings_share_one_matrix() -> None:
    tied, untied = build(), build(tie_embeddings=False)
    assert parameter_count(untied) - parameter_count(tied) == 101 * 32
    assert "lm_head.weight" not in tied.state_dict()


def test_parameter_count_of_gpt2_124m() -> None:
    with torch.device("meta"):
        module = GPT(GptSection(block_size=1024, d_model=768, n_layers=12, n_heads=12), 50257, Numerics())
    padding = (50304 - 50257) * 768
    assert parameter_count(module) - padding == 124_439_808


def test_vocab_size_below_the_tokenizer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"model\.vocab_size.* 101.* 100"):
        GPTAdapter(GptSection(vocab_size=100), tokenizer_vocab=101)


def test_flops_are_about_six_per_weight() -> None:
    adapter = make_adapter(d_model=64, n_layers=4)
    module = adapter.build()
    assert 6 * 0.9 < adapter.flops_per_token(module) / parameter_count(module) < 6 * 1.5


@pytest.mark.parametrize(
    "change", [{"layer_norm_epsilon": 0.01}, {"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}]
)
def test_import_of_a_model_that_computes_something_else_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    changes = SHAPES["tied"]
    make_adapter(**changes).export(build(**changes), tmp_path / "export")
    make_adapter(**changes, init=str(tmp_path / "export")).build()
    path = tmp_path / "export" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError) as error:
        make_adapter(**changes, init=str(tmp_path / "export")).build()
    assert f"{next(iter(change))} {next(iter(change.values()))}" in error.value.what
