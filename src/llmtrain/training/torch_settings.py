"""Settings of torch that hold for the whole process or thread: what a training sets, and what it must not inherit from
the program that calls it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch._functorch.config

from llmtrain.config.run import MAX_THREADS, RunSection
from llmtrain.core.env import SHARED_CORES, restored_environment
from llmtrain.core.logs import warn
from llmtrain.core.text import plural
from llmtrain.distributed.machine_limits import omp_threads, usable_cores
from llmtrain.tracking import mlflow, wandb

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_first_threads: int | None = None
"""Thread count of the first training in this process."""


def resolve_threads(run: RunSection, recorded: int | None, processes: int) -> tuple[int, str]:
    """The number of CPU threads, and where it is from: the config, else the first start of the run (`recorded`), else
    OMP_NUM_THREADS, else this process's share of the cores."""
    from_environment = omp_threads(os.environ)
    if from_environment is None and os.environ.get("OMP_NUM_THREADS") and SHARED_CORES not in os.environ:
        warn("TRAIN", f"ignoring OMP_NUM_THREADS: it must be an integer from 1 to {MAX_THREADS}")
    if recorded and run.threads in (None, recorded):
        return recorded, "recorded at the first start"
    if run.threads:
        if recorded:
            warn("TRAIN", f"run.threads changed from {recorded} to {run.threads}: results are no longer bit-exact")
        return run.threads, "run.threads"
    if from_environment:
        return from_environment, "OMP_NUM_THREADS"
    cores = usable_cores()
    return max(1, cores // processes), f"cores: {cores}, processes: {processes}"


def set_up_torch(run: RunSection) -> None:
    global _first_threads
    assert run.threads
    _first_threads = _first_threads or run.threads
    if run.threads != _first_threads:
        warn(
            "TRAIN",
            f"this process trained with {plural(_first_threads, 'thread')} before, and some libraries keep that "
            f"number: with {run.threads} now, results may differ in the last bits from those of a new process",
        )
    torch.set_num_threads(run.threads)
    if run.deterministic:
        # Read by cuBLAS when it is initialized; without it deterministic mode refuses matrix products on a GPU.
        os.environ.setdefault(CUBLAS, ":4096:8")
    _use_deterministic_algorithms(run.deterministic)
    torch.backends.cudnn.benchmark = not run.deterministic


def _use_deterministic_algorithms(is_deterministic: bool, warns_only: bool = False) -> None:
    is_set = torch.are_deterministic_algorithms_enabled() == is_deterministic
    if not is_set or torch.is_deterministic_algorithms_warn_only_enabled() != warns_only:  # setting it costs a second
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)


@contextmanager
def restored_settings() -> Iterator[None]:
    """Restore what a training changes for the whole process: what set_up_torch and trainer.compile set, the random
    state of the CPU, and the variables of MLflow and W&B."""
    threads = torch.get_num_threads()
    random_state = torch.get_rng_state()
    benchmark = torch.backends.cudnn.benchmark
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    bans_recompute = torch._functorch.config.ban_recompute_materialized_backward
    with restored_environment([CUBLAS, *mlflow.SETTINGS, *wandb.SETTINGS]):
        try:
            yield
        finally:
            torch._functorch.config.ban_recompute_materialized_backward = bans_recompute
            torch.set_num_threads(threads)
            torch.set_rng_state(random_state)
            torch.backends.cudnn.benchmark = benchmark
            _use_deterministic_algorithms(is_deterministic, warns_only)


@contextmanager
def default_settings() -> Iterator[None]:
    """torch as a new process finds it, for the duration of the block: a caller of the Python API may have set another
    data type or device, autocast, no_grad or inference mode, or faster and less precise matrix products."""
    is_on_cpu = torch.get_default_device().type == "cpu"
    with (
        _default_dtype(),
        nullcontext() if is_on_cpu else torch.device("cpu"),
        _no_autocast(),
        _full_matmul_precision(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield


@contextmanager
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _no_autocast() -> Iterator[None]:
    enabled = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in enabled:
            torch.set_autocast_enabled(device, True)


@contextmanager
def _full_matmul_precision() -> Iterator[None]:
    """torch.set_float32_matmul_precision, and the newer settings per backend, of which it sets two."""
    before = torch.get_float32_matmul_precision()
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    precisions = [backend.fp32_precision for backend in backends]
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for backend, precision in zip(backends, precisions, strict=True):
            backend.fp32_precision = precision
