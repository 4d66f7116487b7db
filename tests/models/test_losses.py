"""The loss without all logits, against torch's own."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llmtrain.models import losses as linear_loss
from llmtrain.models.losses import IGNORE_INDEX, linear_cross_entropy

VOCAB, WIDTH = 37, 12


@pytest.fixture(params=[1 << 24, 5 * VOCAB, VOCAB - 1], ids=["one-chunk", "five-rows-a-chunk", "a-row-a-chunk"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Logits held at once: all, several chunks of which the last is short, or fewer than one row needs."""
    monkeypatch.setitem(linear_loss.CHUNK_ELEMENTS, "cpu", request.param)
    return int(request.param)


@pytest.fixture(autouse=True)
def not_compiled() -> Iterator[None]:
    """A run elsewhere in this process may have compiled the chunks."""
    before, linear_loss._chunk_function = linear_loss._chunk_function, linear_loss._chunk
    yield
    linear_loss._chunk_function = before


def some(bias: bool = True, ignored: str = "none", seed: int = 0) -> tuple[Any, Any, Any, torch.Tensor]:
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


def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(
        logits.reshape(-1, VOCAB).float(), targets.reshape(-1), reduction="sum", ignore_index=IGNORE_INDEX
    )


def gradients(loss: torch.Tensor, *leaves: Any) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss * 0.3, [leaf for leaf in leaves if leaf is not None]))


@pytest.mark.parametrize("ignored", ["none", "some"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_value_and_gradients_are_those_of_cross_entropy(chunks: int, bias: bool, ignored: str) -> None:
    assert chunks
    hidden, weight, offset, targets = some(bias, ignored)
    ours, theirs = linear_cross_entropy(hidden, weight, offset, targets), plain(hidden, weight, offset, targets)
    assert ours.dtype == torch.float32
    assert ours.shape == ()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-5)
    found, wanted = gradients(ours, hidden, weight, offset), gradients(theirs, hidden, weight, offset)
    assert len(found) == 2 + bias
    for mine, other in zip(found, wanted, strict=True):
        assert other.abs().max() > 0.1
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_ignored_positions_get_no_gradient(chunks: int) -> None:
    assert chunks
    hidden, weight, offset, targets = some(ignored="some")
    (grad,) = gradients(linear_cross_entropy(hidden, weight, offset, targets), hidden)
    of_position = grad.abs().sum(-1)
    assert (of_position[targets == IGNORE_INDEX] == 0).all()
    assert (of_position[targets != IGNORE_INDEX] > 0).all()


def test_a_chunk_itself_leaves_ignored_targets_out() -> None:
    """On a GPU they are not taken out beforehand."""
    hidden, weight, offset, targets = some(ignored="some")
    logits = F.linear(hidden, weight, offset).reshape(-1, VOCAB).detach().requires_grad_()
    wanted = F.cross_entropy(logits, targets.reshape(-1), reduction="sum", ignore_index=IGNORE_INDEX)
    loss, grad = linear_loss._chunk(logits.detach(), targets.reshape(-1), True)
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(grad, torch.autograd.grad(wanted, logits)[0], rtol=1e-5, atol=1e-6)


def test_all_ignored_is_zero_with_zero_gradients(chunks: int) -> None:
    assert chunks
    hidden, weight, offset, targets = some(ignored="all")
    loss = linear_cross_entropy(hidden, weight, offset, targets)
    assert loss.item() == 0.0
    for grad, leaf in zip(gradients(loss, hidden, weight, offset), (hidden, weight, offset), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_only_what_is_trained_gets_a_gradient(trained: str) -> None:
    """The output layer of a LoRA run is frozen."""
    given = dict(zip(("hidden", "weight", "bias"), some()[:3], strict=True))
    leaves = {name: leaf.detach().requires_grad_(name == trained) for name, leaf in given.items()}
    targets = some()[3]
    linear_cross_entropy(leaves["hidden"], leaves["weight"], leaves["bias"], targets).backward()
    wanted = gradients(plain(*given.values(), targets), given[trained])[0] / 0.3
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name == trained)
    torch.testing.assert_close(leaves[trained].grad, wanted, rtol=1e-5, atol=1e-5)


def test_without_grad_mode(chunks: int) -> None:
    assert chunks
    hidden, weight, offset, targets = some(ignored="some")
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, offset, targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(hidden, weight, offset, targets).detach(), rtol=1e-6, atol=1e-5)


def test_evaluation_takes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half of the work, where nobody asks for it."""
    asked = []
    chunk = linear_loss._chunk
    monkeypatch.setattr(linear_loss, "_chunk_function", lambda *given: asked.append(given[2]) or chunk(*given))
    hidden, weight, offset, targets = some()
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, offset, targets)
    assert asked == [False]
    linear_cross_entropy(hidden, weight, offset, targets)
    assert asked == [False, True]


def test_never_all_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    chunk = linear_loss._chunk
    monkeypatch.setitem(linear_loss.CHUNK_ELEMENTS, "cpu", 5 * VOCAB)
    monkeypatch.setattr(linear_loss, "_chunk_function", lambda *given: sizes.append(len(given[0])) or chunk(*given))
    linear_cross_entropy(*some())
    assert sizes == [5, 5, 5, 3]


def test_bf16_autocast_is_close_and_gives_float32_gradients() -> None:
    hidden, weight, offset, targets = some(ignored="some")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, offset, targets)
        theirs = plain(hidden, weight, offset, targets)
    exact = plain(hidden, weight, offset, targets)
    assert ours.dtype == torch.float32
    assert ours.item() != exact.item(), "autocast was not followed"
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-3)
    assert ours.item() == pytest.approx(exact.item(), rel=1e-2)
    found = gradients(ours, hidden, weight, offset)
    for mine, other in zip(found, gradients(exact, hidden, weight, offset), strict=True):
        assert mine.dtype == torch.float32
        assert (mine - other).norm() < 0.02 * other.norm()


def test_a_bfloat16_output_layer_without_autocast() -> None:
    """model.dtype bfloat16, precision fp32: transformers gives hidden states of the weights' dtype, or of float32."""
    hidden, weight, _, targets = some()
    loss = linear_cross_entropy(hidden, weight.detach().bfloat16(), None, targets)
    exact = plain(hidden, weight, None, targets)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    (mine,), (other,) = gradients(loss, hidden), gradients(exact, hidden)
    assert mine.dtype == torch.float32
    assert (mine - other).norm() < 0.02 * other.norm()


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, offset, targets = some()
    loss = linear_cross_entropy(hidden * 1e4, weight, offset, targets)
    torch.testing.assert_close(loss, plain(hidden * 1e4, weight, offset, targets), rtol=1e-6, atol=1e-3)
    assert all(grad.isfinite().all() for grad in gradients(loss, hidden, weight, offset))
