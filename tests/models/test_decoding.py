"""Steps of fixed shape, which a GPU replays, give what the growing KV cache gives; computed here on the CPU."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from llmtrain.config.model import GptSection, ModernGptSection
from llmtrain.models.compute_dtype import compute_in, copy_in
from llmtrain.models.gpt import decoding
from llmtrain.models.gpt.adapter import GPTAdapter
from llmtrain.models.gpt.decoding import LaunchedDecoding, ReplayedDecoding
from llmtrain.training.text_generation import Sampling, sample_ids
from random_gpt import random_gpt

BLOCK = 24
SHAPE: dict[str, Any] = {"block_size": BLOCK, "d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 101}
MODELS: dict[str, GptSection | ModernGptSection] = {
    "gpt2": GptSection(**SHAPE),
    "relu2": ModernGptSection(**SHAPE),
    "swiglu": ModernGptSection(**SHAPE, n_kv_heads=2, mlp="swiglu", tie_embeddings=False),
    "one-kv-head": ModernGptSection(**SHAPE, n_kv_heads=1),
}
IDS = torch.randint(0, 101, (BLOCK + 5,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three graphs within the context. A CPU without bf16 instructions emulates them, with warnings from mkldnn."""
    monkeypatch.setattr(decoding, "FIRST_SPAN", 8)
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def build(name: str) -> tuple[GPTAdapter, Any]:
    return random_gpt(MODELS[name])


def both(module: Any) -> tuple[LaunchedDecoding, ReplayedDecoding]:
    return LaunchedDecoding(module, 2, BLOCK), ReplayedDecoding(module, 2, BLOCK)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_equal_those_of_the_growing_cache(name: str) -> None:
    """From the prompt to the end of the context and beyond; also when several tokens are new."""
    _, module = build(name)
    launched, replayed = both(module)
    for length in (3, 4, 5, 7, 8, 9, 10, 14, *range(15, len(IDS) + 1)):
        torch.testing.assert_close(replayed(IDS[:length]), launched(IDS[:length]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", [1, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_the_same(name: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, module = build(name)
    sampling = Sampling(BLOCK + 4, temperature=0)
    expected = sample_ids(adapter, module, IDS[:first], sampling, BLOCK)
    monkeypatch.setattr(adapter, "next_logits", lambda module, block: ReplayedDecoding(module, 2, block))
    assert sample_ids(adapter, module, IDS[:first], sampling, BLOCK) == expected


@pytest.mark.parametrize("precision", ["autocast", "cast where used", "cast"])
@pytest.mark.parametrize("name", ["gpt2", "relu2", "swiglu"])
@torch.no_grad()
def test_logits_in_bfloat16_agree(name: str, precision: str) -> None:
    _, module = build(name)
    if precision == "cast":
        module = copy_in(module, torch.bfloat16)
    if precision == "cast where used":
        compute_in(module, torch.bfloat16)
    launched, replayed = both(module)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        for length in range(3, BLOCK + 3):
            found, expected = replayed(IDS[:length]).float(), launched(IDS[:length]).float()
            known = expected.isfinite()  # the others pad the vocabulary
            assert (found - expected)[known].norm() < 0.05 * expected[known].norm()


class Operations(TorchDispatchMode):
    """Records every operation with its arguments, of tensors the shape and data type."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append((str(func), [self._described(each) for each in (*args, *(kwargs or {}).values())]))
        return func(*args, **(kwargs or {}))

    def _described(self, value: Any) -> Any:
        return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else str(value)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_step_runs_the_same_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replay repeats: nothing depends on the position, and nothing is read by Python."""
    monkeypatch.setattr(decoding, "FIRST_SPAN", BLOCK)
    _, module = build(name)
    _, replayed = both(module)
    replayed(IDS[:3])
    replayed(IDS[:4])  # allocates the tensors of the step
    steps = []
    for prompt, length in ((None, 5), (None, 6), (16, 17)):
        if prompt:
            replayed(IDS[:prompt])
        with Operations() as operations:
            replayed(IDS[:length])
        fills = [each for each in operations.found if each[0].startswith("aten.fill_")]
        assert len(fills) == 2  # the token and its position, before the step
        steps.append([each for each in operations.found if each not in fills])
    assert steps[0] == steps[1] == steps[2]
    for operation, _ in steps[0]:
        assert not any(word in operation for word in ("_local_scalar_dense", "nonzero", "index_put", "index_copy"))


@torch.no_grad()
def test_the_keys_and_values_stay_at_their_address() -> None:
    _, module = build("relu2")
    _, replayed = both(module)
    addresses = set()
    for length in (3, 4, 9, BLOCK):
        replayed(IDS[:length])
        for layer in replayed._cache.layers:
            addresses.update(tensor.data_ptr() for tensor in layer.first(1))
    assert len(addresses) == 4  # of two blocks


@torch.no_grad()
def test_memory_is_freed_without_garbage_collection() -> None:
    _, module = build("gpt2")
    _, replayed = both(module)
    gc.disable()
    try:
        for length in (3, 4):
            replayed(IDS[:length])
        assert replayed._step is not None
        step = [weakref.ref(part) for part in (replayed._step, replayed._step._cache)]
        replayed(IDS[: BLOCK + 1])
        assert [part() for part in step] == [None, None], "a full context needs no step of one token"
        freed = [weakref.ref(part) for part in (replayed._full, replayed._cache)]
        del replayed
        assert [part() for part in freed] == [None, None]
    finally:
        gc.enable()


def test_cpu_and_plugins_keep_the_growing_cache() -> None:
    adapter, module = build("gpt2")
    assert type(adapter.next_logits(module, BLOCK)) is LaunchedDecoding

    class Changed(type(module)):  # type: ignore[misc]
        pass

    module.__class__ = Changed
    assert isinstance(module, nn.Module)
    assert not decoding._can_replay(module)
