"""The global random state of torch, which dropout and the initialization of weights use. A model may be loaded in one
thread while another trains, so both hold a lock."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of the block depend only on the seed."""
    with _lock:
        torch.manual_seed(seed)
        yield


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the random state after the block."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with _lock, torch.random.fork_rng(devices):
        yield
