"""What transformer blocks keep in GPU memory when torch.compile compiles them, found out without a GPU.

The first block of each kind is traced with AOTAutograd, which divides it into a forward and a backward graph as it does
in a run. `graph_memory.py` reads from them what is saved and how much each pass needs beside that. Every block then
only allocates these sizes, on the fake tensors of the caller: 80 equal layers cost one trace.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from llmtrain.core.text import one_line
from llmtrain.models.activation_checkpointing import Policy
from llmtrain.plan.graph_memory import BlockMemory, block_memory

Tensor = torch.Tensor
Forward = Callable[..., Any]


class BlockTraceError(Exception):
    """A transformer block cannot be traced, so that the memory of its compiled form is unknown. Raised by the block's
    forward pass; the cause is chained."""


@dataclass(frozen=True)
class _TensorShape:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


@dataclass
class _TracedBlock:
    memory: BlockMemory
    outputs: list[_TensorShape]
    output_spec: TreeSpec
    """Of the block's result, in which the tensors of `outputs` are the leaves."""


class _TraceDone(Exception):
    """Ends AOTAutograd as soon as the graphs exist: nothing is to be compiled or run."""


def plan_compiled_blocks(blocks: Sequence[nn.Module]) -> None:
    """Replace the forward pass of each block by one that allocates what its compiled form would.

    Call the blocks inside of the FakeTensorMode of their weights. Checkpointing (checkpoint_blocks) must have been
    applied before. A TorchDispatchMode of the caller sees the allocations, but not the tracing.
    """
    traced: dict[Hashable, _TracedBlock] = {}
    for block in blocks:
        block.forward = _planned_forward(block, block.forward, traced)


def _planned_forward(block: nn.Module, forward: Forward, traced: dict[Hashable, _TracedBlock]) -> Forward:
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        states = {**dict(block.named_parameters()), **dict(block.named_buffers())}
        indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [*states.values(), *(leaves[index] for index in indices)]
        key = _key(block, forward, tensors, leaves, spec)
        if key not in traced:

            def run(values: Sequence[Tensor]) -> Any:
                """The block's own forward pass with other tensors for its weights and inputs."""
                inputs = list(leaves)
                for index, value in zip(indices, values[len(states) :], strict=True):
                    inputs[index] = value
                new_args, new_kwargs = tree_unflatten(inputs, spec)
                replaced = dict(zip(states, values[: len(states)], strict=True))
                with _reparametrize_module(block, replaced, tie_weights=True):
                    return getattr(forward, "plain_forward", forward)(*new_args, **new_kwargs)

            traced[key] = _trace(run, tensors, len(states), getattr(forward, "new_policy", None))
        plan = traced[key]
        outputs = _CompiledBlock.apply(plan, *tensors)  # type: ignore[no-untyped-call]
        return tree_unflatten(outputs, plan.output_spec)

    return call


def _key(
    block: nn.Module, forward: Forward, tensors: Sequence[Tensor], leaves: Sequence[Any], spec: TreeSpec
) -> Hashable:
    """Equal for blocks that compile to the same graph."""
    shapes = tuple((*_shape(tensor).__dict__.values(), tensor.device.type) for tensor in tensors)
    constants = []
    for leaf in leaves:
        is_plain = leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype))
        constants.append(leaf if is_plain else type(leaf))
    policy = getattr(forward, "new_policy", None)
    modes = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), block.training)
    return (type(block), policy, shapes, tuple(constants), str(spec), modes)


def _shape(tensor: Tensor) -> _TensorShape:
    return _TensorShape(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)


def _trace(
    run: Callable[[Sequence[Tensor]], Any],
    tensors: Sequence[Tensor],
    static_count: int,
    new_policy: Callable[[], Policy] | None,
) -> _TracedBlock:
    """Trace `run` on copies of the tensors, of which the first `static_count` are weights and buffers."""
    results: list[tuple[list[_TensorShape], TreeSpec]] = []
    memories: list[BlockMemory] = []
    needs_grad = [tensor.requires_grad and torch.is_grad_enabled() for tensor in tensors]

    def function(values: list[Tensor]) -> list[Tensor]:
        outputs, spec = tree_flatten(run(values))
        results.append(([_shape(output) for output in outputs], spec))
        return outputs

    def partition(joint: fx.GraphModule, inputs: Any, num_fwd_outputs: int, **_: Any) -> Any:
        joint.graph.eliminate_dead_code()
        if new_policy:
            _tag(joint.graph, new_policy())
        forward, backward = min_cut_rematerialization_partition(
            joint,
            inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=list(range(static_count)),
        )
        inner = [index for index, needed in enumerate(needs_grad) if needed and index >= static_count]
        memories.append(block_memory(forward.graph, backward.graph, num_fwd_outputs, inner))
        raise _TraceDone

    def without_gradients(gm: fx.GraphModule, example_inputs: Any) -> Any:  # noqa: ARG001
        memories.append(block_memory(gm.graph, None, len(results[0][0]), []))
        raise _TraceDone

    try:
        with _tracing(tensors):
            compiled = aot_function(
                function, without_gradients, partition_fn=partition, decompositions=select_decomp_table()
            )
            compiled(_copies(tensors, needs_grad))
    except _TraceDone:
        pass
    except Exception as problem:
        message = f"torch.compile's trace of a transformer block failed: {type(problem).__name__}: "
        raise BlockTraceError(message + one_line(problem, 300)) from problem
    outputs, spec = results[0]
    return _TracedBlock(memories[0], outputs, spec)


def _copies(tensors: Sequence[Tensor], needs_grad: Sequence[bool]) -> list[Tensor]:
    """Tensors of the same layout in memory of their own; those of one data type that share memory still do.

    AOTAutograd leaves its graphs in reference cycles. With the tensors of the caller in them, the memory of the caller
    would seem to be in use until Python's garbage collector runs, which it does at any time.
    """
    bases: dict[tuple[int, torch.dtype], Tensor] = {}
    copies = []
    for tensor, needed in zip(tensors, needs_grad, strict=True):
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.dtype)
        if key not in bases:
            bases[key] = torch.empty(storage.nbytes() // tensor.itemsize, dtype=tensor.dtype, device=tensor.device)
        view = bases[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        copies.append(view.detach().requires_grad_(needed))
    return copies


@contextmanager
def _tracing(tensors: Sequence[Tensor]) -> Iterator[None]:
    """As inside of torch.compile, and unseen by the dispatch modes of the caller."""
    fake_mode = detect_fake_mode(list(tensors))
    if fake_mode is None:
        raise ValueError("the weights and inputs are not fake tensors")
    with _disable_current_modes(), fake_mode, patch.object(torch.compiler, "_is_compiling_flag", True):
        yield


def _tag(graph: fx.Graph, policy: Policy) -> None:
    """Mark what the backward pass computes again, as torch.compile does for a checkpointed function."""
    first_pass = SimpleNamespace(is_recompute=False)
    for node in graph.nodes:
        if node.op != "call_function" or node.meta.get("partitioner_tag") == "is_backward":
            continue
        producer = node
        if not isinstance(node.target, torch._ops.OperatorBase):  # getitem
            producer = node.all_input_nodes[0]
            if producer.meta.get("recompute") == CheckpointPolicy.PREFER_RECOMPUTE:
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
                node.meta["ac_graph_id"] = 0
            continue
        node.meta["recompute"] = policy(first_pass, node.target)
        node.meta["ac_graph_id"] = 0


class _CompiledBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _TracedBlock, *tensors: Tensor) -> tuple[Tensor, ...]:
        memory = plan.memory
        device = tensors[0].device
        outputs = []
        for output in plan.outputs:
            outputs.append(torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device=device))
        ctx.mark_non_differentiable(
            *(result for result, output in zip(outputs, plan.outputs, strict=True) if not output.needs_grad)
        )
        ctx.plan = plan
        ctx.inputs = [_shape(tensor) for tensor in tensors]
        ctx.save_for_backward(*(tensors[index] for index in memory.saved_inputs))
        ctx.buffers = [_buffer(size, device) for size in memory.saved]
        _buffer(memory.forward_transient, device)  # allocated and freed
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        device = upstream[0].device
        _buffer(ctx.plan.memory.backward_transient, device)
        ctx.buffers.clear()
        grads: list[Tensor | None] = []
        for needed, shape in zip(ctx.needs_input_grad[1:], ctx.inputs, strict=True):
            grads.append(torch.empty(shape.shape, dtype=shape.dtype, device=device) if needed else None)
        return None, *grads


def _buffer(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)
