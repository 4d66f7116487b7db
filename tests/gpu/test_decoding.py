"""Generation on a GPU replays a CUDA graph per token and gives the text of the steps launched from Python."""

import threading
from contextlib import nullcontext
from typing import Any

import pytest

BLOCK = 48
SHAPE: dict[str, Any] = {"block_size": BLOCK, "d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 101}
PROMPT = [5, 17, 3]
MODELS = ["gpt2", "relu2", "swiglu"]


@pytest.fixture(autouse=True)
def several_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one context."""
    from llmtrain.models.gpt import decoding

    monkeypatch.setattr(decoding, "FIRST_SPAN", 16)


def build(name: str) -> tuple[Any, Any]:
    import torch

    from llmtrain.config.model import GptSection, ModernGptSection
    from llmtrain.models.gpt.adapter import GPTAdapter

    sections = {
        "gpt2": GptSection(**SHAPE),
        "relu2": ModernGptSection(**SHAPE),
        "swiglu": ModernGptSection(**SHAPE, n_kv_heads=2, mlp="swiglu", tie_embeddings=False),
    }
    torch.manual_seed(0)
    adapter = GPTAdapter(sections[name], 101)
    module = adapter.build()
    for parameter in module.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.15)
    return adapter, module.cuda()


def greedy(adapter: Any, module: Any, count: int = BLOCK + 20) -> list[int]:
    from llmtrain.training.text_generation import Sampling, sample_ids

    return sample_ids(adapter, module, PROMPT, Sampling(count, temperature=0), BLOCK)


def launching(adapter: Any) -> Any:
    """The adapter with steps that are launched from Python."""
    import copy

    from llmtrain.models.gpt.decoding import LaunchedDecoding

    launched = copy.copy(adapter)
    launched.next_logits = lambda module, block_size: LaunchedDecoding(module, SHAPE["n_layers"], block_size)
    return launched


@pytest.mark.parametrize("name", MODELS)
def test_text_is_that_of_launched_steps(name: str) -> None:
    """In float32, also beyond the end of the context; a second text finds no traces of the first."""
    from llmtrain.models.gpt.decoding import ReplayedDecoding

    adapter, module = build(name)
    assert type(adapter.next_logits(module, BLOCK)) is ReplayedDecoding
    expected = greedy(launching(adapter), module)
    assert len(expected) == BLOCK + 20
    assert greedy(adapter, module) == expected
    assert greedy(adapter, module) == expected


@pytest.mark.parametrize("precision", ["autocast", "cast where used", "cast"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_in_bfloat16_agree(name: str, precision: str) -> None:
    import torch

    from llmtrain.models.compute_dtype import compute_in, copy_in
    from llmtrain.models.gpt.decoding import ReplayedDecoding

    adapter, module = build(name)
    module.eval()
    ids = torch.randint(0, 101, (BLOCK + 4,), generator=torch.Generator().manual_seed(1)).tolist()
    if precision == "cast":
        module = copy_in(module, torch.bfloat16)
    if precision == "cast where used":
        compute_in(module, torch.bfloat16)
    context = torch.autocast("cuda", dtype=torch.bfloat16) if precision == "autocast" else nullcontext()
    with torch.no_grad(), context:
        replayed = adapter.next_logits(module, BLOCK)
        assert type(replayed) is ReplayedDecoding
        launched = launching(adapter).next_logits(module, BLOCK)
        for length in range(3, len(ids) + 1):
            found, expected = replayed(ids[:length]).float(), launched(ids[:length]).float()
            known = expected.isfinite()  # the others pad the vocabulary
            assert (found - expected)[known].norm() < 0.05 * expected[known].norm(), length


def test_replays_see_new_weights() -> None:
    """A graph reads the weights where they are; the next text, of trained weights, captures again."""
    adapter, module = build("relu2")
    greedy(adapter, module)
    for parameter in module.parameters():
        parameter.data.mul_(-1)
    assert greedy(adapter, module) == greedy(launching(adapter), module)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_deterministic_mode_and_compiled_blocks(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    adapter, module = build("relu2")
    expected = greedy(launching(adapter), module)
    if is_compiled:
        adapter.compiled_loss(module, by_block=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert greedy(adapter, module) == expected
    finally:
        torch.use_deterministic_algorithms(False)


def test_random_state_mode_and_memory_are_kept() -> None:
    import torch

    adapter, module = build("gpt2")
    module.train()
    greedy(adapter, module)  # cuBLAS allocates its workspaces
    state, memory = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    greedy(adapter, module)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.memory_allocated() == memory
    assert module.training


def test_threads_generate_with_one_model() -> None:
    adapter, module = build("swiglu")
    module.eval()
    expected = greedy(launching(adapter), module)
    texts: list[list[int]] = []
    threads = [threading.Thread(target=lambda: texts.append(greedy(adapter, module))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 4
