"""Activation checkpointing: the same loss and gradients from fewer stored activations."""

import copy
from typing import Any, TypeVar

import pytest
import torch

from llmtrain.compat.numerics import Numerics
from llmtrain.config.model import GptSection, ModernGptSection
from llmtrain.models.activation_checkpointing import checkpoint_blocks
from llmtrain.models.gpt.model import GPT
from llmtrain.models.gpt.modern import ModernGPT

TOKENS = torch.arange(64).view(2, 32) % 50
TARGETS = TOKENS.roll(-1, dims=1)
AnyGPT = TypeVar("AnyGPT", GPT, ModernGPT)
KINDS = pytest.mark.parametrize("is_selective", [False, True], ids=["blocks", "selective"])


def make(dropout: float = 0.1) -> GPT:
    torch.manual_seed(0)
    return GPT(GptSection(n_layers=2, d_model=32, n_heads=2, block_size=32, dropout=dropout), 50, Numerics())


def make_modern(mlp: Any) -> ModernGPT:
    """After some training: output projections are not zero."""
    torch.manual_seed(0)
    section = ModernGptSection(n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, mlp=mlp, block_size=32)
    module = ModernGPT(section, 50, Numerics())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module


def checkpointed(module: AnyGPT, is_selective: bool) -> AnyGPT:
    module = copy.deepcopy(module)
    checkpoint_blocks(list(module.h), is_selective, has_dropout=True)
    return module


def loss_and_gradients(module: GPT | ModernGPT, function: Any = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(1)
    loss = (function or GPT.__call__)(module, TOKENS, TARGETS)
    return loss.detach(), list(torch.autograd.grad(loss, list(module.parameters())))


def assert_equal(actual: tuple[torch.Tensor, list[torch.Tensor]], expected: Any) -> None:
    assert torch.equal(actual[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(actual[1], expected[1], strict=True))


@KINDS
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_loss_and_gradients_have_the_same_bits(is_selective: bool, dropout: float) -> None:
    """With dropout, the same activations are dropped when they are computed again."""
    module = make(dropout)
    assert_equal(loss_and_gradients(checkpointed(module, is_selective)), loss_and_gradients(module))


@KINDS
@pytest.mark.parametrize("mlp", ["swiglu", "relu2"])
def test_modern_blocks_have_the_same_bits(is_selective: bool, mlp: str) -> None:
    module = make_modern(mlp)
    expected = loss_and_gradients(module)
    assert any(gradient.any() for gradient in expected[1])
    assert_equal(loss_and_gradients(checkpointed(module, is_selective)), expected)


@KINDS
def test_compiled_blocks_have_the_same_bits(is_selective: bool) -> None:
    module = make(0.0)
    compiled = torch.compile(GPT.__call__, backend="aot_eager")
    assert_equal(loss_and_gradients(checkpointed(module, is_selective), compiled), loss_and_gradients(module))


def test_parameters_keep_their_names() -> None:
    module = make()
    assert list(checkpointed(module, False).state_dict()) == list(module.state_dict())


def matrix_products(module: GPT) -> dict[str, int]:
    """How often forward and backward together multiply matrices and compute attention."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counts = {"products": 0, "attention": 0}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts["products"] += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            counts["attention"] += "attention" in str(func) and "backward" not in str(func)
            return func(*args, **(kwargs or {}))

    with Counting():
        module(TOKENS, TARGETS).backward()
    return counts


def test_selective_repeats_the_feed_forward_layer_only() -> None:
    """Per block: `blocks` repeats three of four products (the last one has no further use) and attention; `selective`
    neither the one before attention nor attention."""
    module = make(0.0)
    plain = matrix_products(module)
    blocks, selective = (matrix_products(checkpointed(module, each)) for each in (False, True))
    assert blocks["products"] == plain["products"] + 2 * 3
    assert blocks["attention"] == 2 * plain["attention"]
    assert selective["products"] == plain["products"] + 2 * 2
    assert selective["attention"] == plain["attention"]


@KINDS
def test_activations_are_not_kept(is_selective: bool) -> None:
    """Elements that autograd keeps in a forward pass."""

    def kept(module: GPT) -> int:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            module(TOKENS, TARGETS)
        return sum(sizes)

    module = make()
    assert kept(checkpointed(module, is_selective)) < 0.5 * kept(module)


def test_nothing_is_repeated_without_gradients() -> None:
    module = checkpointed(make(0.0), False)
    with torch.no_grad():
        assert torch.equal(module(TOKENS), make(0.0)(TOKENS))
