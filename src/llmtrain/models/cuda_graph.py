"""A computation in tensors of fixed shape, recorded once on a GPU and replayed without Python.

A kernel of a small model runs for a few microseconds, and launching it from Python takes longer.
"""

import threading
from abc import ABC, abstractmethod
from functools import cache

import torch

_capturing = threading.Lock()
"""A process can capture one graph at a time, and all captures of a device use one stream."""


class Replayed(ABC):
    """A computation that reads and writes tensors of fixed addresses only. On a CPU it is computed each time.

    A base class and not a function that is passed in: that would be a circle of references, which keeps memory of the
    GPU until Python collects its garbage.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result = torch.empty(0)

    @abstractmethod
    def compute(self) -> torch.Tensor:
        """Must not wait for the GPU, and what it launches must not depend on values."""

    @torch.no_grad()
    def replay(self) -> torch.Tensor:
        """The result, in a new tensor."""
        if self._device.type != "cuda":
            return self.compute()
        if self._graph is None:
            with _capturing, torch.cuda.device(self._device):
                self._graph = self._capture()
        self._graph.replay()
        return self._result.clone()  # the next replay overwrites the memory of the graph

    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = _capture_stream(torch.cuda.current_device())
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # The first call loads kernels and allocates the workspace of cuBLAS, which a capture must not do. It writes
            # what the replay will write again.
            self._run()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, such as those of NCCL, of data loading and of checkpoints, may use the GPU.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._result = self._run()
        return graph

    def _run(self) -> torch.Tensor:
        """Without the cache of autocast: its casts would be in the memory of the graph, or be freed before a replay."""
        kind = self._device.type
        enabled = torch.is_autocast_enabled(kind)
        with torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=enabled, cache_enabled=False):
            return self.compute()


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One per device: cuBLAS keeps 32 MiB for each stream that it was used on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
