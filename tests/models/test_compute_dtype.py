"""bfloat16 compute with float32 weights: what is cast, and what is not."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from llmtrain.compat.numerics import Numerics
from llmtrain.config.model import GptSection
from llmtrain.models.compute_dtype import compute_in, copy_in
from llmtrain.models.gpt.adapter import GPTAdapter
from llmtrain.models.gpt.model import GPT

VOCAB = 6399  # padded to 6400
TOKENS = torch.arange(24).view(2, 12) % 7
TARGETS = TOKENS.roll(-1, dims=1)


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    """A CPU without bf16 instructions emulates them, with a warning for each matrix product of mkldnn."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def module(request: pytest.FixtureRequest) -> GPT:
    torch.manual_seed(0)
    section = GptSection(n_layers=2, d_model=32, n_heads=2, block_size=12, tie_embeddings=request.param)
    return GPT(section, VOCAB, Numerics())


def dtypes_in_blocks(module: nn.Module) -> set[torch.dtype]:
    """Data types of the outputs of all modules in one forward pass."""
    found: set[torch.dtype] = set()
    hooks = [
        part.register_forward_hook(lambda _part, _inputs, output: found.add(output.dtype)) for part in module.modules()
    ]
    module(TOKENS)
    for hook in hooks:
        hook.remove()
    return found


def test_every_layer_computes_in_bfloat16(module: GPT) -> None:
    assert dtypes_in_blocks(module) == {torch.float32}
    compute_in(module, torch.bfloat16)
    assert dtypes_in_blocks(module) == {torch.bfloat16}


def test_parameters_state_and_gradients_stay_float32(module: GPT) -> None:
    before = copy.deepcopy(module.state_dict())
    parameters = list(module.parameters())
    compute_in(module, torch.bfloat16)
    module(TOKENS, TARGETS).backward()
    assert [id(each) for each in module.parameters()] == [id(each) for each in parameters]
    assert all(each.grad is not None and each.grad.dtype == torch.float32 for each in parameters)
    state = module.state_dict()
    assert list(state) == list(before)
    assert all(torch.equal(state[name], before[name]) for name in before)


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
def test_loss_and_gradients_are_close_to_float32(module: GPT, chunked: bool) -> None:
    def run(part: GPT) -> tuple[float, list[torch.Tensor]]:
        loss = part(TOKENS, TARGETS) if chunked else adapter.loss(part, TOKENS, TARGETS)
        return loss.item(), list(torch.autograd.grad(loss, list(part.parameters())))

    adapter = GPTAdapter(GptSection(), VOCAB)
    loss, grads = run(module)
    compute_in(module, torch.bfloat16)
    low_loss, low_grads = run(module)
    assert low_loss != loss
    assert low_loss == pytest.approx(loss, rel=1e-2)
    for low, grad in zip(low_grads, grads, strict=True):
        assert (low - grad).norm() < 0.04 * grad.norm()


def test_gradient_of_a_frequent_token_is_summed_in_float32() -> None:
    """A sum of 5,000 ones stops at 256 in bfloat16."""
    embedding = nn.Sequential(nn.Embedding(3, 2))
    compute_in(embedding, torch.bfloat16)
    rows = embedding(torch.ones(5000, dtype=torch.int64))
    assert rows.dtype == torch.bfloat16
    rows.sum().backward()
    gradient = embedding[0].weight.grad
    assert gradient is not None
    assert gradient[1].tolist() == [5000.0, 5000.0]


def test_frozen_weights_are_stored_in_bfloat16(module: GPT) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("ln_" in name)
    compute_in(module, torch.bfloat16)
    stored = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    assert {stored[name] for name in stored if "ln_" in name} == {torch.float32}
    assert {stored[name] for name in stored if "ln_" not in name} == {torch.bfloat16}
    assert dtypes_in_blocks(module) == {torch.bfloat16}


def test_copy_computes_the_same_and_leaves_the_module_alone(module: GPT) -> None:
    copied = copy_in(module, torch.bfloat16)
    assert {each.dtype for each in copied.parameters()} == {torch.bfloat16}
    assert {each.dtype for each in module.parameters()} == {torch.float32}
    compute_in(module, torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(copied(TOKENS), module(TOKENS))
        assert torch.equal(copied(TOKENS, TARGETS), module(TOKENS, TARGETS))


def test_chunked_loss_equals_whole_logits(module: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32: the same loss and gradients, and small batches keep their bits."""
    from llmtrain.models import losses

    adapter = GPTAdapter(GptSection(), VOCAB)
    assert adapter.numerics == Numerics()
    calls: list[Any] = []
    chunk = losses._chunk
    monkeypatch.setattr(module.output_loss, "_chunk", lambda *args: calls.append(args) or chunk(*args))
    whole = adapter.loss(module, TOKENS, TARGETS)
    assert not calls, "few logits are computed at once"
    monkeypatch.setitem(losses.CHUNK_ELEMENTS, "cpu", 5 * VOCAB)
    chunked = adapter.loss(module, TOKENS, TARGETS)
    assert len(calls) == 6  # 24 positions, 4 per chunk: the padded vocabulary is a little larger
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=1e-5)
    parameters = list(module.parameters())
    pairs = zip(torch.autograd.grad(chunked, parameters), torch.autograd.grad(whole, parameters), strict=True)
    for gradient, expected in pairs:
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
    adapter.numerics = Numerics(1)
    assert torch.equal(adapter.loss(module, TOKENS, TARGETS), whole)
