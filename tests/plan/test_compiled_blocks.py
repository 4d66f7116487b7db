"""Memory of compiled blocks, against what torch.compile really saves."""

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmtrain.config.model import GptSection, HfCausalLmSection, LoraSection, ModernGptSection
from llmtrain.models.activation_checkpointing import checkpoint_blocks
from llmtrain.models.compute_dtype import compute_in
from llmtrain.models.gpt.adapter import GPTAdapter
from llmtrain.models.hf.causal_lm import HFCausalLMAdapter
from llmtrain.plan.compiled_blocks import BlockTraceError, plan_compiled_blocks
from llmtrain.plan.graph_memory import BlockMemory, block_memory

GPT2 = GptSection(
    name="gpt", block_size=64, d_model=64, n_layers=2, n_heads=4, dropout=0.0, vocab_size=256, init="random"
)
MODERN = ModernGptSection(name="gpt", architecture="modern", block_size=64, n_layers=2, d_model=64, vocab_size=256)
SHAPE = (4, 64)  # (B, T)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all storages that operators made and that still exist."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.seen:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            self.live -= size
            del self.seen[key]

        self.seen[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[BlockMemory]:
    """What was found out per traced block."""
    found: list[BlockMemory] = []

    def recorded(*args: Any) -> BlockMemory:
        found.append(block_memory(*args))
        return found[-1]

    monkeypatch.setattr("llmtrain.plan.compiled_blocks.block_memory", recorded)
    return found


def build_gpt(section: Any, is_selective: bool | None = None) -> tuple[GPTAdapter, Any]:
    """`is_selective`: kind of activation checkpointing; None for none."""
    adapter = GPTAdapter(section, 256)
    module = adapter.build()
    compute_in(module, torch.bfloat16)
    if is_selective is not None:
        checkpoint_blocks(adapter.blocks(module), is_selective, has_dropout=False)
    return adapter, module


def kept_by_compiled_block(section: Any, is_selective: bool | None) -> int:
    """Bytes that torch.compile's graph saves, apart from the block's inputs, weights and result."""
    adapter, module = build_gpt(section, is_selective)
    block = adapter.blocks(module)[0]
    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph.forward,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    known = [each.untyped_storage().data_ptr() for each in [*block.parameters(), *module.buffers()]]
    x = torch.zeros(*SHAPE, module.wte.weight.shape[1], dtype=torch.bfloat16, requires_grad=True)
    inputs: tuple[Any, ...] = (x,)
    if hasattr(module, "rotary_cos"):
        inputs = (x, (module.rotary_cos, module.rotary_sin))
    result = torch.compile(block, backend=backend)(*inputs)
    known += [x.untyped_storage().data_ptr(), result.untyped_storage().data_ptr()]
    saved: dict[int, int] = {}
    for tensor in result.grad_fn.saved_tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
    return sum(saved.values())


@pytest.mark.parametrize(
    ("section", "is_selective"),
    [(GPT2, None), (MODERN, None), (GPT2, True)],
    ids=["gpt2", "modern", "gpt2, selective checkpointing"],
)
def test_saved_bytes_are_those_of_torch_compile(
    section: Any, is_selective: bool | None, memories: list[BlockMemory]
) -> None:
    expected = kept_by_compiled_block(section, is_selective)
    with FakeTensorMode():
        adapter, module = build_gpt(section, is_selective)
        plan_compiled_blocks(adapter.blocks(module))
        module.hidden_states(torch.zeros(SHAPE, dtype=torch.int64))
    (memory,) = memories
    assert sum(memory.saved) == pytest.approx(expected, rel=0.02)  # rounded up to 512 bytes per tensor


def test_each_kind_of_block_is_traced_once(memories: list[BlockMemory]) -> None:
    with FakeTensorMode():
        adapter, module = build_gpt(GPT2)
        plan_compiled_blocks(adapter.blocks(module))
        for _ in range(2):
            module.hidden_states(torch.zeros(SHAPE, dtype=torch.int64)).sum().backward()
        assert len(memories) == 1
        module.hidden_states(torch.zeros(2, 64, dtype=torch.int64))
        assert len(memories) == 2  # another shape


def test_step_allocates_saved_tensors_and_gradients(memories: list[BlockMemory]) -> None:
    with FakeTensorMode():
        adapter, module = build_gpt(GPT2)
        block = adapter.blocks(module)[0]
        plan_compiled_blocks([block])
        x = torch.zeros(*SHAPE, 64, dtype=torch.bfloat16, requires_grad=True)
        with LiveBytes() as bytes_:
            result = block(x)
            after_forward = bytes_.live
            result.backward(torch.empty_like(result))
            del result
    (memory,) = memories
    assert memory.saved_inputs  # x, for the norm
    assert after_forward == 2 * x.numel() + sum(memory.saved)
    assert bytes_.peak >= after_forward + memory.backward_transient > after_forward
    assert bytes_.live == 2 * x.numel() + sum(4 * weight.numel() for weight in block.parameters())
    for weight in block.parameters():
        assert weight.grad is not None
        assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, weight.dtype)


def test_input_is_freed_without_garbage_collection() -> None:
    """AOTAutograd's graphs are in reference cycles. They must not keep what the caller has freed."""
    with FakeTensorMode():
        adapter, module = build_gpt(GPT2)
        block = adapter.blocks(module)[0]
        plan_compiled_blocks([block])
        gc.collect()
        gc.disable()
        try:
            with LiveBytes() as bytes_:
                x = torch.zeros(*SHAPE, 64, dtype=torch.bfloat16, requires_grad=True)
                result = block(x)
                del x, result
            assert bytes_.live == 0
        finally:
            gc.enable()


def test_evaluation_saves_nothing(memories: list[BlockMemory]) -> None:
    with FakeTensorMode(), torch.no_grad():
        adapter, module = build_gpt(GPT2)
        plan_compiled_blocks(adapter.blocks(module))
        assert module.hidden_states(torch.zeros(SHAPE, dtype=torch.int64)).shape == (*SHAPE, 64)
    (memory,) = memories
    assert memory.saved == []
    assert memory.forward_transient > 0


def test_checkpointed_block_saves_its_input_only(memories: list[BlockMemory]) -> None:
    with FakeTensorMode():
        adapter, module = build_gpt(GPT2, is_selective=False)
        plan_compiled_blocks(adapter.blocks(module))
        module.hidden_states(torch.zeros(SHAPE, dtype=torch.int64))
    (memory,) = memories
    assert sum(memory.saved) < 8192  # the state of the CPU's random numbers: attention may draw some
    assert memory.backward_transient > 400_000  # what the block saves without checkpointing


def fake_copy(module: nn.Module) -> None:
    """Put fake tensors into the place of the parameters and buffers of a module on the meta device."""
    copies: dict[int, Any] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in copies:
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
                    if isinstance(tensor, nn.Parameter):
                        copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
                    copies[id(tensor)] = copy
                tensors[name] = copies[id(tensor)]


def test_lora_blocks_use_the_operators_of_torch_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operators: list[str] = []

    def recorded(forward: Any, backward: Any, *args: Any) -> BlockMemory:
        operators.extend(str(node.target) for node in [*forward.nodes, *backward.nodes])
        return block_memory(forward, backward, *args)

    monkeypatch.setattr("llmtrain.plan.compiled_blocks.block_memory", recorded)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    section = HfCausalLmSection(
        name="hf_causal_lm",
        path=str(tmp_path),
        block_size=64,
        attention="sdpa",
        lora=LoraSection(rank=4),
        dtype="bfloat16",
    )
    adapter = HFCausalLMAdapter(section, 300)
    with torch.device("meta"):
        module = adapter.build_empty()
    with FakeTensorMode():
        fake_copy(module)
        compute_in(module, torch.bfloat16)
        plan_compiled_blocks(adapter.blocks(module))
        tokens = torch.zeros(SHAPE, dtype=torch.int64)
        module(tokens).sum().backward()
    assert {"llmtrain.lora_forward.default", "llmtrain.lora_backward.default"} <= set(operators)
    for weight in module.parameters():
        assert (weight.grad is not None) == weight.requires_grad


class DependsOnValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if x.sum().item() > 0 else x


class TakesRealTensors(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.from_numpy(x.numpy())


@pytest.mark.parametrize("build", [DependsOnValues, TakesRealTensors])
def test_untraceable_block_raises_one_error(build: Callable[[], nn.Module]) -> None:
    with FakeTensorMode():
        block = build()
        plan_compiled_blocks([block])
        with pytest.raises(BlockTraceError):
            block(torch.zeros(3, requires_grad=True))
