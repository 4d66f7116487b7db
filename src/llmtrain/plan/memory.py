"""Memory that one process of a planned run needs, and the disk of the run.

Weights, gradients and optimizer states follow from the shapes of the weights. What a step keeps and needs for a moment
is found by running the real step on fake tensors (trace.py) with what CUDA's kernels save (cuda_kernels.py).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from llmtrain.config.model import HfCausalLmSection
from llmtrain.config.schema import Config
from llmtrain.core.text import one_line
from llmtrain.errors import LlmtrainError
from llmtrain.models.base import block_matrices
from llmtrain.models.device_precision import autocast_for
from llmtrain.models.losses import ChunkedLoss
from llmtrain.models.sizes import CHUNK_ELEMENTS
from llmtrain.models.target_device import planned_for
from llmtrain.plan.compiled_blocks import plan_compiled_blocks
from llmtrain.plan.cuda_kernels import CudaKernels
from llmtrain.plan.equal_blocks import TRACED, equal_blocks, extrapolated, only_first, phases_of
from llmtrain.plan.fake_model import FakeModel
from llmtrain.plan.memory_value import (
    Memory,
    StepMemory,
    WeightSizes,
    has_all_gradients,
    is_sharded,
    memory_of,
)
from llmtrain.plan.pair_shapes import with_pair_shapes
from llmtrain.plan.states import factored_numbers
from llmtrain.plan.target import Target
from llmtrain.plan.trace import BACKWARD, GRADIENTS, MemoryTracker, Trace, extended, naming_parts

TRACED_CHUNKS = 64
"""Chunks of the loss in the largest micro-batch that is traced: hundreds take half a minute."""
LONGEST_SEQUENCE_CHUNKS = 512
"""Chunks of the loss of one sequence, at most."""
EAGER_UNCERTAINTY = 0.05
COMPILED_UNCERTAINTY = 0.10
CPU_UNCERTAINTY = 0.15
CPU_CHECKPOINTING_UNCERTAINTY = 0.30
"""Blocks that are computed again leave larger gaps in the heap: see HEAP_FACTOR."""


def estimate_memory(config: Config, model: FakeModel, target: Target, saves: int | None = None) -> Memory:
    """`saves`: checkpoints that the run writes, for trainer.keep_checkpoints `all`."""
    config = with_pair_shapes(config)
    unknown = {}
    activations = None
    parts: dict[str, int] = {}
    try:
        trace = _trace_any_size(config, model, target)
        gradients_in_trace = 0 if is_sharded(config, target) else model.trained_bytes
        activations = max(0, trace.peak_bytes - gradients_in_trace)
        parts = {name: size for name, size in trace.parts.items() if name != GRADIENTS}
    except LlmtrainError:
        raise
    except Exception as problem:  # an operation that needs values or another device
        unknown["activations"] = f"the step cannot be traced: {type(problem).__name__}: {one_line(problem, 200)}"
        unknown["peak"] = unknown["activations"]
    step = StepMemory(activations, parts, _uncertainty(config, target.device == "cuda"), unknown)
    return memory_of(config, target, _weight_sizes(model), step, saves)


def _weight_sizes(model: FakeModel) -> WeightSizes:
    blocks = model.adapter.blocks(model.module)
    matrices = block_matrices(model.adapter, model.module).values()
    in_blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    trained = [sum(p.numel() for p in block.parameters() if p.requires_grad) for block in blocks]
    return WeightSizes(
        parameters=model.size.parameters,
        weight_bytes=model.weight_bytes,
        trained_bytes=model.trained_bytes,
        bytes_per_trained=max((parameter.element_size() for parameter in model.trained), default=4),
        matrices=model.matrices,
        largest_matrix=max((parameter.numel() for parameter in matrices), default=0),
        largest_trained_bytes=max((parameter.nbytes for parameter in model.trained), default=0),
        outside=model.size.parameters - sum(in_blocks),
        largest_block=max(in_blocks, default=0),
        largest_trained_block=max(trained, default=0),
        factored=factored_numbers(tuple(parameter.shape) for parameter in model.trained),
    )


def _trace_any_size(config: Config, model: FakeModel, target: Target) -> Trace:
    """Every chunk of the loss takes time to trace. A micro-batch with very many is not traced itself, but two smaller
    ones: from there on, every sequence needs as much as the one before."""
    size = config.trainer.micro_batch_size
    chunk = CHUNK_ELEMENTS[target.device]
    per_sequence = config.model.block_size * model.adapter.vocab_size
    if per_sequence > LONGEST_SEQUENCE_CHUNKS * chunk:
        raise ValueError(f"a sequence of {config.model.block_size:,} tokens is too long to be traced")
    large = max(2, TRACED_CHUNKS * chunk // per_sequence)
    if size <= large:
        return trace_step(config, model, target)
    few = trace_step(config.with_values("trainer", micro_batch_size=large // 2), model, target)
    more = trace_step(config.with_values("trainer", micro_batch_size=large), model, target)
    return extended(few, more, (size - large) / (large - large // 2))


def trace_step(config: Config, model: FakeModel, target: Target) -> Trace:
    """The tensors of one micro-batch's forward and backward pass, gradients included."""
    blocks = equal_blocks(model.module)
    if blocks is not None:
        phases = []
        for count in TRACED:
            with only_first(blocks, count):
                phases.append(_phases(config, model, target))
        trace = extrapolated(phases[0], phases[1], len(blocks))
        if trace is not None:
            return trace
    return max(_phases(config, model, target), key=lambda phase: phase.peak_bytes)


def _phases(config: Config, model: FakeModel, target: Target) -> list[Trace]:
    """The peaks before and after the backward pass reaches the first block."""
    trainer = config.trainer
    adapter = model.adapter
    module = model.module
    blocks = adapter.blocks(module)
    tracker = MemoryTracker()
    with ExitStack() as stack:
        stack.enter_context(model.mode)
        stack.enter_context(planned_for(target.device))
        tokens = torch.zeros(trainer.micro_batch_size, config.model.block_size, dtype=torch.int64)
        for tensor in (*module.parameters(), *module.buffers()):
            tracker.ignore(tensor)
        stack.enter_context(naming_parts(tracker, blocks))
        stack.enter_context(phases_of(tracker, blocks))
        stack.enter_context(tracker)
        if is_sharded(config, target):
            _free_gradients(stack, model)
        elif has_all_gradients(config, target):
            with tracker.naming(GRADIENTS):
                for parameter in model.trained:
                    parameter.grad = torch.zeros_like(parameter)
        if target.device == "cuda":
            kernels = _compiled(model) if trainer.compile else CudaKernels(_mask_elements(config, model))
            stack.enter_context(kernels)
        inputs = tokens.clone()
        targets = tokens.clone()
        with autocast_for(trainer, adapter, tokens.device)():
            loss = adapter.loss(module, inputs, targets, None)
        with tracker.naming(BACKWARD):
            loss.backward()  # type: ignore[no-untyped-call]
    for parameter in model.trained:
        parameter.grad = None
    return tracker.phases()


@contextmanager
def _compiled(model: FakeModel) -> Iterator[None]:
    """Use what the blocks keep when they are compiled, and the loss of a compiled model: see adapter.compiled_loss. A
    GPT that is compiled as a whole saves the same tensors in each block. Its last norm is always one kernel."""
    norms = [getattr(model.module, name) for name in ("ln_f", "norm_f") if hasattr(model.module, name)]
    blocks = [*model.adapter.blocks(model.module), *norms]
    with ExitStack() as stack:
        for block in blocks:
            stack.callback(setattr, block, "forward", block.forward)
        before = getattr(model.module, "output_loss", None)
        if before is not None:
            stack.callback(setattr, model.module, "output_loss", before)
            setattr(model.module, "output_loss", ChunkedLoss(model.adapter.numerics, is_compiled=True))  # noqa: B010
        section = model.adapter.config
        if isinstance(section, HfCausalLmSection):
            keeps = section.lora is not None
            stack.enter_context(torch._functorch.config.patch(ban_recompute_materialized_backward=keeps))
        plan_compiled_blocks(blocks)
        yield


def _free_gradients(stack: ExitStack, model: FakeModel) -> None:
    """Free the gradient of each parameter when it is complete, as FSDP does after it has reduced it."""

    def free(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for parameter in model.trained:
        hook = parameter.register_post_accumulate_grad_hook(free)  # type: ignore[no-untyped-call]
        stack.callback(hook.remove)


def _mask_elements(config: Config, model: FakeModel) -> int:
    """Of the mask (B, 1, T, T) that sdpa needs for packed examples; flash and flex attention need none."""
    if not model.is_packed or model.attention != "sdpa":
        return 0
    return config.trainer.micro_batch_size * config.model.block_size**2


def _uncertainty(config: Config, is_gpu: bool) -> float:
    if not is_gpu:
        is_checkpointed = config.trainer.activation_checkpointing != "none"
        return CPU_CHECKPOINTING_UNCERTAINTY if is_checkpointed else CPU_UNCERTAINTY
    return COMPILED_UNCERTAINTY if config.trainer.compile else EAGER_UNCERTAINTY
