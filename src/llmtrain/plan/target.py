"""Where a planned run would train."""

from dataclasses import dataclass

from llmtrain.core.gpus import Gpu


@dataclass(frozen=True)
class Target:
    device: str
    """`cuda` or `cpu`."""
    memory_bytes: int | None
    """Of one GPU; without GPUs, of one node, for all its processes. None: unknown."""
    gpu: Gpu | None = None
    """None on a CPU, and for a GPU of which only the memory is known."""
    nodes: int = 1
    processes_per_node: int = 1
    cpu: tuple[str, int] | None = None
    """Name of the CPU and threads per process, of a target without GPUs. None: those of this machine."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes_per_node


@dataclass(frozen=True)
class ModelSize:
    """Counted from the shapes of the weights."""

    parameters: int
    trained: int
    flops_per_token: float
    """Forward and backward pass."""
    layers: int = 1
    """A model without transformer blocks counts as one."""
    vocab_size: int | None = None
    """Without padding. None: unknown."""
