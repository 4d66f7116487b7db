"""`gpt` against transformers' GPT-2, and the properties a GPT has."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.config.model import GptSection
from llmtrain.errors import DataError, UsageError
from llmtrain.models.base import parameter_count
from llmtrain.models.gpt.model import GPT, GPTAdapter, padded_vocab

SHAPES = {
    "tied": {"vocab_size": 101},
    "untied": {"vocab_size": 101, "tie_embeddings": False},
    "d_ff": {"vocab_size": 101, "d_ff": 56},
    "padded": {"vocab_size": 6399},
    "padded-untied": {"vocab_size": 6399, "tie_embeddings": False},
    "deep": {"vocab_size": 64, "n_layers": 6, "n_heads": 8, "d_model": 64},
}


def adapter(**changes: Any) -> GPTAdapter:
    values = {"block_size": 24, "d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 101, **changes}
    return GPTAdapter(GptSection(**values), tokenizer_vocab=values["vocab_size"])


def built(seed: int = 0, scale: float = 1.0, **changes: Any) -> GPT:
    """A model; a larger scale than GPT-2's initialisation makes differences of logits visible."""
    torch.manual_seed(seed)
    module = adapter(**changes).build()
    assert isinstance(module, GPT)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(scale)
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return module.eval()


def some_tokens(vocab_size: int, rows: int = 3, length: int = 24) -> torch.Tensor:
    return torch.randint(0, vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.hf
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_those_of_transformers(tmp_path: Path, shape: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")
    changes = SHAPES[shape]
    ours = built(scale=2.0, **changes)
    adapter(**changes).export(ours, tmp_path / "export")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    assert theirs.config.vocab_size == changes["vocab_size"]
    tokens = some_tokens(changes["vocab_size"])
    with torch.no_grad():
        logits, wanted = ours(tokens)[..., : changes["vocab_size"]], theirs(tokens).logits
    assert logits.shape == wanted.shape == (3, 24, changes["vocab_size"])
    assert wanted.std() > 0.1, "logits that hardly differ from 0 would prove nothing"
    assert (logits - wanted).abs().max() < 1e-5


@pytest.mark.hf
@pytest.mark.parametrize("shape", ["tied", "untied", "padded"])
def test_loss_and_gradients_equal_those_of_transformers(tmp_path: Path, shape: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")
    changes = SHAPES[shape]
    ours = built(scale=4.0, **changes)
    adapter(**changes).export(ours, tmp_path / "export")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    tokens = some_tokens(changes["vocab_size"], length=25)[:, :24]
    loss = adapter(**changes).loss(ours, tokens[:, :-1], tokens[:, 1:].contiguous()) / (3 * 23)
    wanted = theirs(tokens, labels=tokens).loss
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    loss.backward()
    wanted.backward()
    got = ours.h[1].attn.c_attn.weight.grad
    assert got is not None
    torch.testing.assert_close(got.t(), theirs.transformer.h[1].attn.c_attn.weight.grad, rtol=1e-4, atol=1e-6)
    embedding = ours.wte.weight.grad
    assert embedding is not None
    torch.testing.assert_close(
        embedding[: changes["vocab_size"]], theirs.transformer.wte.weight.grad, rtol=1e-4, atol=1e-6
    )
    assert embedding[changes["vocab_size"] :].abs().sum() == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_import_gives_the_exported_model_back(tmp_path: Path, shape: str) -> None:
    changes = SHAPES[shape]
    module = built(**changes)
    adapter(**changes).export(module, tmp_path / "export")
    torch.manual_seed(99)
    back = adapter(**changes, init=str(tmp_path / "export")).build().state_dict()
    state = module.state_dict()
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        rows = changes["vocab_size"] if name in ("wte.weight", "lm_head.weight") else len(tensor)
        assert torch.equal(back[name][:rows], tensor[:rows]), name
        assert back[name].shape == tensor.shape, name
    tokens = some_tokens(changes["vocab_size"])
    back_module = adapter(**changes, init=str(tmp_path / "export")).build().eval()
    assert torch.equal(back_module(tokens), module(tokens))


@pytest.mark.hf
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_transformers_saved_can_be_imported(tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=101, n_positions=24, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=tied
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = adapter(tie_embeddings=tied, init=str(tmp_path / "theirs")).build().eval()
    tokens = some_tokens(101)
    with torch.no_grad():
        assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-5


def test_an_import_of_another_shape_is_refused(tmp_path: Path) -> None:
    adapter().export(built(), tmp_path / "export")
    with pytest.raises(DataError, match="n_embd is 32 there, 64 here"):
        adapter(d_model=64, init=str(tmp_path / "export")).build()
    with pytest.raises(DataError, match="tie_word_embeddings is True there, False here"):
        adapter(tie_embeddings=False, init=str(tmp_path / "export")).build()
    with pytest.raises(UsageError, match="is not a model in GPT-2 format"):
        adapter(init=str(tmp_path / "nothing")).build()


def test_no_token_sees_a_later_one() -> None:
    module = built(scale=4.0)
    tokens = some_tokens(101, rows=1)
    before = module(tokens)
    for position in (1, 10, 23):
        changed = tokens.clone()
        changed[0, position] = (changed[0, position] + 1) % 101
        after = module(changed)
        assert torch.equal(after[0, :position], before[0, :position])
        assert not torch.allclose(after[0, position:], before[0, position:])


def test_a_shorter_context_gives_the_same_logits() -> None:
    module = built(scale=4.0)
    tokens = some_tokens(101)
    torch.testing.assert_close(module(tokens[:, :7]), module(tokens)[:, :7], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [65, 1000, 6399])
def test_the_first_loss_is_that_of_guessing(vocab_size: int) -> None:
    torch.manual_seed(0)
    made = adapter(vocab_size=vocab_size, d_model=64)
    module = made.build().eval()
    tokens = some_tokens(vocab_size, rows=16)
    loss = made.loss(module, tokens, some_tokens(vocab_size, rows=17)[1:]).item() / tokens.numel()
    assert loss == pytest.approx(math.log(vocab_size), abs=0.05)


def test_initial_weights_are_those_of_gpt2() -> None:
    torch.manual_seed(0)
    module = adapter(d_model=128, n_layers=8, vocab_size=640).build()
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0, name
        elif ".ln_" in name or name.startswith("ln_f"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            wanted = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(wanted, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.1 * wanted, name


def test_dropout_works_in_training_only() -> None:
    module = built(dropout=0.5)
    tokens = some_tokens(101)
    assert torch.equal(module(tokens), module(tokens))
    module.train()
    assert not torch.equal(module(tokens), module(tokens))
    torch.manual_seed(5)
    first = module(tokens)
    torch.manual_seed(5)
    assert torch.equal(module(tokens), first)


def test_padding_of_the_vocabulary() -> None:
    assert padded_vocab(50257) == 50304
    assert padded_vocab(6399) == 6400
    assert padded_vocab(65) == 65
    assert padded_vocab(256) == 256
    module = built(vocab_size=6399)
    assert module.wte.weight.shape[0] == 6400
    logits = module(some_tokens(6399))
    assert logits[..., 6399:].exp().sum() == 0, "a padding row must never be predicted"
    assert logits[..., :6399].isfinite().all()
    assert "padding" not in module.state_dict()


def test_tied_means_one_matrix() -> None:
    tied, untied = built(), built(tie_embeddings=False)
    assert parameter_count(untied) - parameter_count(tied) == 101 * 32
    assert "lm_head.weight" not in tied.state_dict()


def test_parameter_count_of_gpt2_124m() -> None:
    with torch.device("meta"):
        module = GPT(GptSection(block_size=1024, d_model=768, n_layers=12, n_heads=12), 50257)
    padding = (50304 - 50257) * 768
    assert parameter_count(module) - padding == 124_439_808


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused() -> None:
    with pytest.raises(UsageError, match="smaller than the tokenizer's vocabulary of 101"):
        GPTAdapter(GptSection(vocab_size=100), tokenizer_vocab=101)


def test_flops_are_about_six_for_each_weight() -> None:
    made = adapter(d_model=64, n_layers=4)
    module = made.build()
    assert 6 * 0.9 < made.flops_per_token(module) / parameter_count(module) < 6 * 1.5
