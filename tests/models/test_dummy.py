"""`dummy_gpt`: the fast smoke path keeps the contract of a model."""

from pathlib import Path

import pytest
import torch

from llmtrain.config.model import DummyGptSection
from llmtrain.errors import UsageError
from llmtrain.models.base import parameter_count
from llmtrain.models.dummy_gpt import DummyGPTAdapter


def adapter(**changes: float) -> DummyGPTAdapter:
    return DummyGPTAdapter(DummyGptSection(d_model=16, **changes), tokenizer_vocab=50)


def test_logits_and_loss() -> None:
    torch.manual_seed(0)
    made = adapter()
    module = made.build()
    tokens = torch.randint(0, 50, (4, 9))
    logits = module(tokens)
    assert logits.shape == (4, 9, 50)
    by_hand = -logits.log_softmax(-1).gather(-1, tokens[..., None]).sum()
    assert made.loss(module, tokens, tokens).item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_targets_that_do_not_count() -> None:
    made = adapter()
    module = made.build()
    tokens = torch.randint(0, 50, (2, 4))
    targets = tokens.clone()
    targets[1] = -100
    only_the_first = made.loss(module, tokens[:1], tokens[:1])
    assert made.loss(module, tokens, targets).item() == pytest.approx(only_the_first.item(), rel=1e-6)


def test_a_token_is_predicted_from_the_one_before_only() -> None:
    module = adapter().build()
    tokens = torch.tensor([[1, 2, 3], [9, 2, 8]])
    logits = module(tokens)
    assert torch.equal(logits[0, 1], logits[1, 1])
    assert not torch.equal(logits[0, 0], logits[1, 0])


def test_dropout_works_in_training_only() -> None:
    module = adapter(dropout=0.5).build()
    tokens = torch.randint(0, 50, (2, 4))
    assert not torch.equal(module(tokens), module(tokens))
    module.eval()
    assert torch.equal(module(tokens), module(tokens))


def test_it_learns() -> None:
    torch.manual_seed(0)
    made = adapter()
    module = made.build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    tokens = torch.arange(50)[None]
    targets = (tokens + 1) % 50
    losses = []
    for _ in range(30):
        loss = made.loss(module, tokens, targets) / 50
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.2 * losses[0]


def test_it_says_that_it_cannot_be_exported(tmp_path: Path) -> None:
    made = adapter()
    with pytest.raises(UsageError, match="no export format"):
        made.export(made.build(), tmp_path)
    assert made.flops_per_token(made.build()) == 6 * parameter_count(made.build())
