"""The memory of a compiled block, from its forward and backward graphs.

Not every value of a graph is written to memory: inductor computes elementwise operations where their results are read.
In memory are the inputs and results of matrix products, attention and other operators that it calls, the results of
reductions, and what a graph returns. Views share the memory of their base.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import OpTypes, get_default_op_list
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
_MOVING = (aten.cat, aten.roll, aten.slice_scatter, aten.index)
GRANULE = 512
"""The CUDA allocator rounds up to this many bytes."""


@dataclass(frozen=True)
class BlockMemory:
    saved: list[int]
    """Bytes of each new tensor that the forward pass keeps for the backward pass, without the block's results."""
    saved_inputs: list[int]
    """Indices of the inputs that it keeps."""
    forward_transient: int
    """Bytes at the peak of the forward pass that it has freed at its end."""
    backward_transient: int
    """Bytes at the peak of the backward pass, above all that was saved."""


@dataclass(eq=False)
class _Kernel:
    """One operator or fused loop."""

    reads: set[int]
    writes: dict[int, int]
    """Storage -> bytes."""
    is_fused: bool
    workspace: int = 0
    """Bytes in use while it runs."""
    shared: set[int] = field(default_factory=set)
    """Storages that several of its results are computed from: none of them can be written in their place."""


@dataclass
class _Graph:
    kernels: list[_Kernel] = field(default_factory=list)
    returned: set[int] = field(default_factory=set)


def block_memory(
    forward: fx.Graph, backward: fx.Graph | None, result_count: int, activations: Sequence[int]
) -> BlockMemory:
    """`result_count`: how many outputs of the forward graph are not saved tensors; `activations`: inputs that only the
    forward pass keeps alive, so that the backward pass frees them after their last use."""
    inputs: dict[int, int] = {}  # storage -> index of the first input in it
    for index, node in enumerate(forward.find_nodes(op="placeholder")):
        for storage in _storages(node):
            inputs.setdefault(storage, index)
    outputs: Sequence[Any] = forward.output_node().args[0]  # type: ignore[assignment]
    results = _sizes(outputs[:result_count])
    kept = _sizes(outputs[result_count:])
    saved = {storage: size for storage, size in kept.items() if storage not in inputs and storage not in results}
    saved_inputs = sorted({inputs[storage] for storage in kept if storage in inputs})
    freeable = dict(saved)
    for storage, size in kept.items():
        if storage in results or inputs.get(storage) in activations:
            freeable[storage] = size
    forward_graph = _kernels(forward)
    forward_transient = _peak(forward_graph, {}) - sum((results | saved).values())
    backward_transient = 0
    if backward is not None:
        backward_transient = _peak(_kernels(backward), freeable) - sum(freeable.values())
    return BlockMemory(list(saved.values()), saved_inputs, max(0, forward_transient), max(0, backward_transient))


def _peak(graph: _Graph, live: dict[int, int]) -> int:
    """Largest number of bytes in use, if those of `live` are at the start and all are freed after their last use."""
    live = dict(live)
    last_use: dict[int, int] = dict.fromkeys(graph.returned, len(graph.kernels))
    for time, kernel in enumerate(graph.kernels):
        for storage in kernel.reads:
            last_use[storage] = max(time, last_use.get(storage, 0))
    total = peak = sum(live.values())
    for time, kernel in enumerate(graph.kernels):
        done = [storage for storage in kernel.reads if storage in live and last_use[storage] == time]
        for storage, size in kernel.writes.items():
            reused = None
            if kernel.is_fused:
                reused = next((other for other in done if live[other] == size and other not in kernel.shared), None)
            if reused is None:
                total += size
            else:  # written in the place of an input
                done.remove(reused)
                del live[reused]
            live[storage] = size
        peak = max(peak, total + kernel.workspace)
        done += [storage for storage in kernel.writes if storage not in last_use]
        for storage in done:
            total -= live.pop(storage)
    return peak


def _kernels(graph: fx.Graph) -> _Graph:
    """The operators that write to memory, in the order of the graph."""
    written = _written(graph)
    found = _Graph(returned=set(_sizes(graph.output_node().args)))
    known: set[int] = set()
    reads: dict[fx.Node, set[int]] = {}  # what a kernel that uses the node's value reads
    moved: set[fx.Node] = set()  # values that have their elements elsewhere than what they are computed from
    for node in graph.nodes:
        storages = _sizes([node])
        new = {storage: size for storage, size in storages.items() if storage not in known}
        known.update(new)
        inputs: set[int] = set()
        for each in node.all_input_nodes:
            inputs |= reads[each]
        in_memory = {storage for storage in storages if storage in written}
        if _moves(node) or any(each in moved for each in node.all_input_nodes):
            moved.add(node)
        reads[node] = in_memory or inputs
        writes = {storage: size for storage, size in new.items() if storage in written}
        if writes and node.op == "call_function":
            kernel = _Kernel(inputs, writes, _is_fused(node), _workspace(node))
            if node in moved:
                kernel.shared = inputs
            found.kernels.append(kernel)
        if in_memory:
            moved.discard(node)
    found.kernels = _with_siblings_fused(found.kernels)
    return found


def _with_siblings_fused(kernels: list[_Kernel]) -> list[_Kernel]:
    """Loops of the same size over the same tensor become one, as in inductor, at the place of the later one. So the
    gradients of gate and up and the recomputed input of the last matrix of SwiGLU are in memory together."""
    kernels = list(kernels)
    first = 0
    while first < len(kernels):
        dependents: list[_Kernel] = []  # kernels that need the first one's result
        results = set(kernels[first].writes)
        for second in range(first + 1, len(kernels)):
            if not kernels[second].reads.isdisjoint(results):
                dependents.append(kernels[second])
                results |= kernels[second].writes.keys()
            elif _are_siblings(kernels[first], kernels[second]):
                between = kernels[first + 1 : second]
                independent = [kernel for kernel in between if kernel not in dependents]
                kernels[first : second + 1] = [*independent, _fused(kernels[first], kernels[second]), *dependents]
                break
        else:
            first += 1
    return kernels


def _are_siblings(first: _Kernel, second: _Kernel) -> bool:
    has_same_size = set(first.writes.values()) == set(second.writes.values())
    return first.is_fused and second.is_fused and has_same_size and not first.reads.isdisjoint(second.reads)


def _fused(first: _Kernel, second: _Kernel) -> _Kernel:
    shared = first.shared | second.shared | (first.reads & second.reads)
    return _Kernel(first.reads | second.reads, first.writes | second.writes, is_fused=True, shared=shared)


def _written(graph: fx.Graph) -> set[int]:
    """Storages that are in memory."""
    written: set[int] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            written.update(_storages(node))
        elif node.op == "output" or not _is_fused(node):
            written.update(_storages(node))
            written.update(_sizes(node.all_input_nodes))
        elif _is_reduction(node):
            written.update(_storages(node))
    return written


def _is_fused(node: fx.Node) -> bool:
    """Whether inductor generates code for the operator, which it can fuse with that of others."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True  # getitem
    packet = node.target.overloadpacket
    return packet in (aten.cat, aten.unbind, aten.split_with_sizes) or _op_types().is_fusible(node)


def _moves(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket in _MOVING


def _is_reduction(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.reduction in node.target.tags


def _workspace(node: fx.Node) -> int:
    """The backward pass of attention sums the gradient of the queries in float32."""
    name = str(node.target)
    if "attention" not in name or "backward" not in name:
        return 0
    queries: torch.Tensor = node.all_input_nodes[1].meta["val"]  # behind the gradient of the result
    return 4 * queries.numel()


@cache
def _op_types() -> OpTypes:
    return get_default_op_list()


def _storages(node: fx.Node) -> Iterable[int]:
    return _sizes([node])


def _sizes(nodes: Any) -> dict[int, int]:
    """Storage -> bytes, of the values of all nodes in nested lists."""
    sizes: dict[int, int] = {}
    for node in tree_leaves(nodes):
        if not isinstance(node, fx.Node):
            continue
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                sizes[storage._cdata] = -(-storage.nbytes() // GRANULE) * GRANULE
    return sizes
