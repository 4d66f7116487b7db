"""The chunked linear cross-entropy against torch's cross-entropy."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llmtrain.compat.numerics import Numerics
from llmtrain.core.targets import IGNORE_INDEX
from llmtrain.models import losses
from llmtrain.training.torch_settings import restored_settings

VOCAB, WIDTH = 37, 12


def linear_cross_entropy(*values: Any) -> torch.Tensor:
    return losses.ChunkedLoss(Numerics())(*values)


@pytest.fixture(
    params=[1 << 24, 5 * VOCAB, VOCAB - 1], ids=["one-chunk", "five-positions-per-chunk", "one-position-per-chunk"]
)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Logits per chunk: all, several chunks with a short last one, or fewer than one position needs."""
    monkeypatch.setitem(losses.CHUNK_ELEMENTS, "cpu", request.param)
    return int(request.param)


def make_inputs(bias: bool = True, ignored: str = "none", seed: int = 0) -> tuple[Any, Any, Any, torch.Tensor]:
    """hidden (3, 6, WIDTH), weight, bias, targets (3, 6), large enough that no loss is near log(VOCAB)."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(3, 6, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).requires_grad_()
    offset = torch.randn(VOCAB, generator=generator).requires_grad_() if bias else None
    targets = torch.randint(0, VOCAB, (3, 6), generator=generator)
    if ignored == "some":
        targets[0, :4] = IGNORE_INDEX
        targets[2, 5] = IGNORE_INDEX
    elif ignored == "all":
        targets[:] = IGNORE_INDEX
    return hidden, weight, offset, targets


def reference(hidden: torch.Tensor, weight: torch.Tensor, bias: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(
        logits.reshape(-1, VOCAB).float(), targets.reshape(-1), reduction="sum", ignore_index=IGNORE_INDEX
    )


def gradients(loss: torch.Tensor, *leaves: Any) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss * 0.3, [leaf for leaf in leaves if leaf is not None]))


@pytest.mark.parametrize("ignored", ["none", "some"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_loss_and_gradients_equal_cross_entropy(chunks: int, bias: bool, ignored: str) -> None:
    assert chunks
    hidden, weight, offset, targets = make_inputs(bias, ignored)
    loss, expected = linear_cross_entropy(hidden, weight, offset, targets), reference(hidden, weight, offset, targets)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-5)
    grads, expected_grads = gradients(loss, hidden, weight, offset), gradients(expected, hidden, weight, offset)
    assert len(grads) == 2 + bias
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert expected_grad.abs().max() > 0.1
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-5)


def test_ignored_positions_get_no_gradient(chunks: int) -> None:
    assert chunks
    hidden, weight, offset, targets = make_inputs(ignored="some")
    (grad,) = gradients(linear_cross_entropy(hidden, weight, offset, targets), hidden)
    per_position = grad.abs().sum(-1)
    assert (per_position[targets == IGNORE_INDEX] == 0).all()
    assert (per_position[targets != IGNORE_INDEX] > 0).all()


def test_chunk_ignores_targets() -> None:
    """On a GPU, ignored positions are not removed before chunking."""
    hidden, weight, offset, targets = make_inputs(ignored="some")
    logits = F.linear(hidden, weight, offset).reshape(-1, VOCAB).detach().requires_grad_()
    expected = F.cross_entropy(logits, targets.reshape(-1), reduction="sum", ignore_index=IGNORE_INDEX)
    loss, grad = losses._chunk(logits.detach(), targets.reshape(-1), True)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, logits)[0], rtol=1e-5, atol=1e-6)


def test_all_targets_ignored_gives_zero_loss_and_gradients(chunks: int) -> None:
    assert chunks
    hidden, weight, offset, targets = make_inputs(ignored="all")
    loss = linear_cross_entropy(hidden, weight, offset, targets)
    assert loss.item() == 0.0
    for grad, leaf in zip(gradients(loss, hidden, weight, offset), (hidden, weight, offset), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_only_trainable_inputs_get_a_gradient(trained: str) -> None:
    """The output layer of a LoRA run is frozen."""
    tensors = dict(zip(("hidden", "weight", "bias"), make_inputs()[:3], strict=True))
    leaves = {name: leaf.detach().requires_grad_(name == trained) for name, leaf in tensors.items()}
    targets = make_inputs()[3]
    linear_cross_entropy(leaves["hidden"], leaves["weight"], leaves["bias"], targets).backward()
    expected = gradients(reference(*tensors.values(), targets), tensors[trained])[0] / 0.3
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name == trained)
    torch.testing.assert_close(leaves[trained].grad, expected, rtol=1e-5, atol=1e-5)


def test_without_grad_mode(chunks: int) -> None:
    assert chunks
    hidden, weight, offset, targets = make_inputs(ignored="some")
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, offset, targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, reference(hidden, weight, offset, targets).detach(), rtol=1e-6, atol=1e-5)


def test_no_gradient_is_computed_without_grad_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is half of the work of the forward pass."""
    needs_grad = []
    chunk = losses._chunk
    monkeypatch.setattr(losses, "_chunk", lambda *args: needs_grad.append(args[2]) or chunk(*args))
    hidden, weight, offset, targets = make_inputs()
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, offset, targets)
    assert needs_grad == [False]
    linear_cross_entropy(hidden, weight, offset, targets)
    assert needs_grad == [False, True]


def test_logits_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    chunk = losses._chunk
    monkeypatch.setitem(losses.CHUNK_ELEMENTS, "cpu", 5 * VOCAB)
    monkeypatch.setattr(losses, "_chunk", lambda *args: sizes.append(len(args[0])) or chunk(*args))
    linear_cross_entropy(*make_inputs())
    assert sizes == [5, 5, 5, 3]


def test_bf16_autocast_gives_float32_gradients() -> None:
    hidden, weight, offset, targets = make_inputs(ignored="some")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, offset, targets)
        expected = reference(hidden, weight, offset, targets)
    exact = reference(hidden, weight, offset, targets)
    assert loss.dtype == torch.float32
    assert loss.item() != exact.item(), "autocast had no effect"
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    grads = gradients(loss, hidden, weight, offset)
    for grad, exact_grad in zip(grads, gradients(exact, hidden, weight, offset), strict=True):
        assert grad.dtype == torch.float32
        assert (grad - exact_grad).norm() < 0.02 * exact_grad.norm()


def test_bfloat16_output_layer_without_autocast() -> None:
    """model.dtype bfloat16, precision fp32: hidden states may have the dtype of the weights, or float32."""
    hidden, weight, _, targets = make_inputs()
    loss = linear_cross_entropy(hidden, weight.detach().bfloat16(), None, targets)
    exact = reference(hidden, weight, None, targets)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    (grad,), (exact_grad,) = gradients(loss, hidden), gradients(exact, hidden)
    assert grad.dtype == torch.float32
    assert (grad - exact_grad).norm() < 0.02 * exact_grad.norm()


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, offset, targets = make_inputs()
    loss = linear_cross_entropy(hidden * 1e4, weight, offset, targets)
    torch.testing.assert_close(loss, reference(hidden * 1e4, weight, offset, targets), rtol=1e-6, atol=1e-3)
    assert all(grad.isfinite().all() for grad in gradients(loss, hidden, weight, offset))


@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_chunk_in_place_equals_chunk(ignored: str) -> None:
    hidden, weight, offset, targets = make_inputs(ignored=ignored)
    logits = F.linear(hidden, weight, offset).reshape(-1, VOCAB).detach()
    loss, grad = losses._chunk(logits.clone(), targets.reshape(-1), True)
    in_place = logits.clone()
    own_loss, own_grad = losses._chunk_in_place(in_place, targets.reshape(-1), True)
    assert own_grad.data_ptr() == in_place.data_ptr()
    torch.testing.assert_close(own_loss, loss)
    torch.testing.assert_close(own_grad, grad)
    losses._chunk_in_place(logits, targets.reshape(-1), False)
    torch.testing.assert_close(logits, F.linear(hidden, weight, offset).reshape(-1, VOCAB).detach())


def test_compiled_loss_belongs_to_one_module(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    with restored_settings():
        loss = losses.compiled_loss(Numerics())
        by_token = [losses.token_losses, losses.token_losses_in_place]
        assert compiled == [*by_token, losses._chunk, losses._chunk_in_place]
        assert torch.equal(loss(*make_inputs()), linear_cross_entropy(*make_inputs()))
        assert len(compiled) == 4, "another loss of this process is not compiled"
        torch._functorch.config.ban_recompute_materialized_backward = False
    assert torch._functorch.config.ban_recompute_materialized_backward
