"""`dummy_gpt` fulfills the model contract."""

from pathlib import Path

import pytest
import torch

from llmtrain.config.model import DummyGptSection
from llmtrain.errors import UsageError
from llmtrain.models.base import parameter_count
from llmtrain.models.dummy_gpt import DummyGPTAdapter


def make_adapter(**changes: float) -> DummyGPTAdapter:
    return DummyGPTAdapter(DummyGptSection(d_model=16, **changes), tokenizer_vocab=50)


def test_logits_and_loss() -> None:
    torch.manual_seed(0)
    adapter = make_adapter()
    module = adapter.build()
    tokens = torch.randint(0, 50, (4, 9))
    logits = module(tokens)
    assert logits.shape == (4, 9, 50)
    by_hand = -logits.log_softmax(-1).gather(-1, tokens[..., None]).sum()
    assert adapter.loss(module, tokens, tokens).item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_ignored_targets_have_no_loss() -> None:
    adapter = make_adapter()
    module = adapter.build()
    tokens = torch.randint(0, 50, (2, 4))
    targets = tokens.clone()
    targets[1] = -100
    first_only = adapter.loss(module, tokens[:1], tokens[:1])
    assert adapter.loss(module, tokens, targets).item() == pytest.approx(first_only.item(), rel=1e-6)


def test_prediction_depends_on_the_previous_token_only() -> None:
    module = make_adapter().build()
    tokens = torch.tensor([[1, 2, 3], [9, 2, 8]])
    logits = module(tokens)
    assert torch.equal(logits[0, 1], logits[1, 1])
    assert not torch.equal(logits[0, 0], logits[1, 0])


def test_dropout_is_active_in_training_only() -> None:
    module = make_adapter(dropout=0.5).build()
    tokens = torch.randint(0, 50, (2, 4))
    assert not torch.equal(module(tokens), module(tokens))
    module.eval()
    assert torch.equal(module(tokens), module(tokens))


def test_training_reduces_the_loss() -> None:
    torch.manual_seed(0)
    adapter = make_adapter()
    module = adapter.build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    tokens = torch.arange(50)[None]
    targets = (tokens + 1) % 50
    losses = []
    for _ in range(30):
        loss = adapter.loss(module, tokens, targets) / 50
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.2 * losses[0]


def test_export_is_refused(tmp_path: Path) -> None:
    adapter = make_adapter()
    with pytest.raises(UsageError, match="dummy_gpt"):
        adapter.export(adapter.build(), tmp_path)


def test_flops_per_token() -> None:
    adapter = make_adapter()
    assert adapter.flops_per_token(adapter.build()) == 6 * parameter_count(adapter.build())
