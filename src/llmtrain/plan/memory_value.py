"""The memory of one process as a value: the sizes of its weights and what a step needs beside them, added up. Without
torch."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from llmtrain.config.model import HfCausalLmSection
from llmtrain.config.schema import Config
from llmtrain.distributed.batch_split import MicroBatchRange, micro_batches_in_step
from llmtrain.plan.states import optimizer_bytes
from llmtrain.plan.target import Target

CHARACTERS = 256
"""Vocabulary of the tokenizer char, which depends on the text. Few texts have more, and the model hardly grows."""
QUANTIZED_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Per weight of a 4-bit layer: its bits, an 8-bit scale per 64 weights and a float32 scale per 256 of these."""
LOGIT_CAPS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "logits_soft_cap")
"""Fields of config.json with which something follows the output layer: its loss is not computed in chunks."""
MB = 1 << 20
CUDA_CONTEXT = 600 * MB
"""CUDA itself with the kernels that torch loads; not in torch.cuda.max_memory_allocated. Not measured."""
CUBLAS_WORKSPACE = 32 * MB
"""On Hopper; 8 MB on earlier GPUs."""
NCCL_BUFFERS = 400 * MB
"""Of all communicators of a process; not measured."""
FRAGMENTATION = 0.05
"""Of the allocator's peak, that lies unused between tensors. Not measured."""
CUDA_PROCESS = 1500 * MB
"""CPU memory of a process with torch and CUDA's libraries loaded; not measured."""
PYTHON_PROCESS = 340 * MB
"""A process on a CPU with torch and llmtrain loaded, before it has a model."""
HEAP_FACTOR = 1.15
"""On a CPU, memory of the process per byte of tensors: the C library's heap has gaps. Measured with benchmarks/plan.py,
x86_64: 1.04 to 1.25 for nine shapes of GPTs, and 1.8 for one with checkpointing of activations."""
HF_LIBRARIES = 200 * MB
"""transformers and peft, in addition."""
MEASURED_UNCERTAINTY = 0.03
"""Of a peak that a run of the same shape had."""
MUON_TEMPORARIES = 6
"""Intermediate results of an orthogonalization, each as large as its batch of matrices."""
MUON_BATCH = 1 << 26


@dataclass(frozen=True)
class Memory:
    """Bytes of one process. What is not known is None, with the reason in `unknown`."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    """fsdp: weights and gradients of whole blocks while they are computed."""
    activations: int | None
    """What a step needs in addition at its peak."""
    parts: dict[str, int]
    """Where the activations are: by the part of a block, the largest first. With one micro-batch per step not all
    gradients exist at the peak, and the parts take some of their place: they add up to more than `activations`."""
    peak: int | None
    """What torch.cuda.max_memory_allocated will report; on a CPU, the peak of the process."""
    overhead: int
    """In addition to the peak on a GPU: CUDA's context, memory lost between tensors, NCCL's buffers."""
    host: int
    """CPU memory of a process with a GPU, at its peak while it loads the model or saves a checkpoint."""
    checkpoint: int
    disk: int | None
    """Checkpoints of the whole run, with one that is being written."""
    uncertainty: float
    """Relative, of the peak."""
    unknown: dict[str, str]
    predicted_peak: int | None = None
    """The estimate of `peak`, where a run of this shape has measured it."""
    measured_by: str | None = None
    """The run that measured it."""
    is_from_formula: bool = False
    """Not from tracing the step."""

    @property
    def needed(self) -> int | None:
        """All of the device's memory that the process takes."""
        return None if self.peak is None else self.peak + self.overhead

    @property
    def at_least(self) -> int:
        """Without activations."""
        return self.weights + self.gradients + self.optimizer + self.gathered

    @property
    def peak_source(self) -> str:
        """`from a formula, ±25 %`"""
        if self.measured_by is not None:
            return f"measured by run {self.measured_by}"
        source = "from a formula, " if self.is_from_formula else ""
        return f"{source}±{self.uncertainty * 100:.0f} %"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "needed": self.needed}


@dataclass(frozen=True)
class WeightSizes:
    """Of the whole model, before it is sharded. Numbers of weights where the name does not say bytes."""

    parameters: int
    weight_bytes: int
    trained_bytes: int
    """Of the trained weights, among weight_bytes."""
    bytes_per_trained: int
    matrices: int
    """Trained weights that muon orthogonalizes."""
    largest_matrix: int
    largest_trained_bytes: int
    outside: int
    """Outside of transformer blocks: embeddings, output layer, last norm."""
    largest_block: int
    largest_trained_block: int
    factored: int
    """Numbers that adafactor keeps of the trained weights."""


@dataclass(frozen=True)
class StepMemory:
    """What a step needs beside weights, gradients and the optimizer's averages. See Memory."""

    activations: int | None
    parts: dict[str, int]
    uncertainty: float
    unknown: dict[str, str]
    is_from_formula: bool = False


def memory_of(
    config: Config, target: Target, weights: WeightSizes, step: StepMemory, saves: int | None = None
) -> Memory:
    """`saves`: checkpoints that the run writes, for trainer.keep_checkpoints `all`."""
    trainer = config.trainer
    shards = target.world_size if is_sharded(config, target) else 1
    averages = optimizer_bytes(
        trainer.optimizer, weights.trained_bytes, weights.matrices, weights.bytes_per_trained, weights.factored
    )
    stored = weights.weight_bytes // shards
    gradients = weights.trained_bytes * (1 + _branches(config, target)) // shards
    optimizer = averages // shards
    gathered = _gathered(config, weights) if is_sharded(config, target) else 0
    is_gpu = target.device == "cuda"
    peak = None
    if step.activations is not None:
        update = gradients + _update_bytes(config, weights)
        peak = stored + optimizer + gathered + max(gradients + step.activations, update)
        peak = peak + CUBLAS_WORKSPACE if is_gpu else int(HEAP_FACTOR * peak) + _process_bytes(config)
    checkpoint = weights.trained_bytes + averages
    return Memory(
        weights=stored,
        gradients=gradients,
        optimizer=optimizer,
        gathered=gathered,
        activations=step.activations,
        parts=step.parts,
        peak=peak,
        overhead=gpu_overhead(peak or stored + optimizer, target) if is_gpu else 0,
        host=_host_bytes(config, weights.parameters, checkpoint // shards) if is_gpu else 0,
        checkpoint=checkpoint,
        disk=_disk(config, checkpoint, saves),
        uncertainty=step.uncertainty,
        unknown=step.unknown,
        is_from_formula=step.is_from_formula,
    )


def with_measured_peak(memory: Memory, peak: int, run_id: str, target: Target) -> Memory:
    """The memory with the peak of a finished run of the same shape on the same device."""
    return replace(
        memory,
        peak=peak,
        overhead=gpu_overhead(peak, target) if target.device == "cuda" else 0,
        uncertainty=MEASURED_UNCERTAINTY,
        unknown={name: why for name, why in memory.unknown.items() if name != "peak"},
        predicted_peak=memory.peak,
        measured_by=run_id,
    )


def is_sharded(config: Config, target: Target) -> bool:
    """Whether each process holds a shard of the model. One process is joined to a world only by a launcher."""
    return config.distributed.strategy == "fsdp" and target.world_size > 1


def _micro_batches(config: Config, target: Target) -> int:
    """Of one process, per step."""
    total = micro_batches_in_step(config.trainer, config.distributed, target.world_size)
    return MicroBatchRange.of_rank(0, target.world_size, total).count


def has_all_gradients(config: Config, target: Target) -> bool:
    """Whether gradients of all weights exist while the largest micro-batch is computed: those of the micro-batch
    before, or DDP's buckets, which are allocated once."""
    return _micro_batches(config, target) > 1 or target.world_size > 1


def _branches(config: Config, target: Target) -> int:
    """Sums of gradients that reproducible_reduce holds beside the current one: a path of its tree."""
    if not config.distributed.reproducible_reduce:
        return 0
    count = _micro_batches(config, target)
    levels = 0
    while count and count % 2 == 0:
        count //= 2
        levels += 1
    return levels


def _process_bytes(config: Config) -> int:
    return PYTHON_PROCESS + (HF_LIBRARIES if isinstance(config.model, HfCausalLmSection) else 0)


def gpu_overhead(allocated: int, target: Target) -> int:
    nccl = NCCL_BUFFERS if target.world_size > 1 else 0
    return CUDA_CONTEXT + nccl + int(FRAGMENTATION * allocated)


def _disk(config: Config, checkpoint: int, saves: int | None) -> int | None:
    keep = config.trainer.keep_checkpoints
    if keep == "all":
        return None if saves is None else saves * checkpoint
    most = keep + 2  # the best one, and one that is being written before an old one is deleted
    return checkpoint * (most if saves is None else min(most, saves))


def _gathered(config: Config, weights: WeightSizes) -> int:
    """FSDP gathers the weights of a block while the one before is computed, and those outside of blocks for the whole
    step; the gradients of a block are reduced in float32."""
    size = 2 if config.trainer.computes_in_bf16 else 4
    return (weights.outside + 2 * weights.largest_block) * size + 4 * weights.largest_trained_block


def _update_bytes(config: Config, weights: WeightSizes) -> int:
    """What the optimizer needs for a moment."""
    optimizer = config.trainer.optimizer
    if optimizer == "muon":
        return MUON_TEMPORARIES * 2 * min(weights.matrices, max(MUON_BATCH, weights.largest_matrix))
    if optimizer == "adafactor":
        return 2 * weights.largest_trained_bytes
    return 0  # one fused kernel


def _host_bytes(config: Config, parameters: int, saved: int) -> int:
    """The model is built or read on the CPU; a checkpoint is copied there before it is written."""
    loaded = 4 * parameters
    if isinstance(config.model, HfCausalLmSection) and config.model.dtype == "bfloat16":
        loaded = 2 * parameters
    return CUDA_PROCESS + max(loaded, saved)
