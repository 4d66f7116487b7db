"""Checks of this machine or container: shared memory, cores, GPUs, and the volumes for runs and caches."""

import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmtrain.config.data import DataSection
from llmtrain.config.output import OutputSection
from llmtrain.config.run import RunSection
from llmtrain.config.trainer import TrainerSection
from llmtrain.core.files import is_there
from llmtrain.core.findings import Finding, failed, passed, warned
from llmtrain.core.text import format_bytes, plural
from llmtrain.data.cache_dir import token_cache_dir
from llmtrain.distributed.machine_limits import gpu_count, usable_cores
from llmtrain.doctor.file_system import file_system
from llmtrain.errors import LlmtrainError
from llmtrain.runs.directory import check_writable

SHARED_MEMORY = Path("/dev/shm")
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
GIB = 1 << 30
PROBE_BYTES = 64_000_000  # more than a disk's own cache takes at once, and written within seconds
SLOW_BYTES_PER_SEC = 50_000_000  # a checkpoint of 1 GB then takes 20 s


def shared_memory(run: RunSection, num_workers: int, least_bytes: int = GIB) -> Iterator[Finding]:
    """NCCL and data-loading processes use it; the default of a container is 64 MB."""
    if not SHARED_MEMORY.is_dir():
        yield passed("shared memory", f"this machine has no {SHARED_MEMORY}")
        return
    total = shutil.disk_usage(SHARED_MEMORY).total
    evidence = f"{SHARED_MEMORY} has {format_bytes(total)}"
    if total >= least_bytes or not (num_workers or uses_gpu(run)):
        yield passed("shared memory", evidence)
        return
    yield warned(
        "shared memory",
        f"{evidence}; GPUs and data.num_workers need {format_bytes(least_bytes)}",
        "In a pod, mount an emptyDir with medium: Memory at /dev/shm. With Docker, pass --shm-size=8g.",
    )


def cores(run: RunSection, processes: int) -> Iterator[Finding]:
    available = usable_cores()
    threads = run.threads
    if threads is None:
        per_process = plural(max(1, available // processes), "thread")
        evidence = f"{plural(available, 'core')}, {per_process} for each of {plural(processes, 'process')}"
        if processes <= available or uses_gpu(run):
            yield passed("cores", evidence)
        else:
            yield warned("cores", evidence, "Start fewer processes, or raise the CPU limit of the container.")
        return
    evidence = (
        f"{plural(available, 'core')}; run.threads {threads} x {plural(processes, 'process')} is {threads * processes}"
    )
    if threads * processes <= available:
        yield passed("cores", evidence)
    else:
        yield warned(
            "cores",
            f"{evidence}: more threads than cores",
            f"Set run.threads to {max(1, available // processes)}, start fewer processes, or raise the CPU limit.",
        )


def gpus(run: RunSection, processes: int, environ: Mapping[str, str]) -> Iterator[Finding]:
    import torch

    listed = gpu_count(environ)
    if not torch.cuda.is_available():
        build = f"torch {torch.__version__}"
        if run.device == "cuda":
            evidence = f"run.device is cuda, but {build} finds no usable GPU; the driver lists {listed}"
            yield failed("gpu", evidence, "Check nvidia-smi, request nvidia.com/gpu, or set run.device to auto.")
        elif listed and run.device == "auto":
            yield warned(
                "gpu",
                f"the driver lists {plural(listed, 'GPU')}, but {build} cannot use them: training will run on the CPU",
                "Install a CUDA build of torch that supports the driver, or set run.device to cpu.",
            )
        else:
            yield passed("gpu", "run.device is cpu" if listed else "no GPU: training runs on the CPU")
        return
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    evidence = f"{count} x {', '.join(names)}; driver {_driver()}, CUDA {torch.version.cuda}, NCCL {nccl_version()}"
    if run.device == "cpu":
        yield passed("gpu", f"{evidence}; unused: run.device is cpu")
    elif processes > count:
        yield failed(
            "gpu",
            f"{evidence}; {plural(processes, 'process')} on this node",
            f"Start at most {plural(count, 'process')} per node, one per GPU, or set run.device to cpu.",
        )
    else:
        yield passed("gpu", evidence)


def uses_gpu(run: RunSection) -> bool:
    import torch

    return run.device != "cpu" and torch.cuda.is_available()


def nccl_version() -> str:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _driver() -> str:
    """`NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  ...` -> 550.54.15"""
    try:
        words = DRIVER_VERSION.read_text().split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def cache_directory(data: DataSection) -> Iterator[Finding]:
    """Free space and permissions of the directory for tokenized text."""
    cache = token_cache_dir(data)
    yield free_space("cache space", cache, GIB)
    yield writable("cache", cache, "Set data.cache_dir to a directory you may write to.")


def output_directory(
    output: OutputSection, trainer: TrainerSection, checkpoint_bytes: int | None, time_writing: bool
) -> Iterator[Finding]:
    """Free space, permissions, file system and write speed of the directory for runs."""
    root = Path(output.root_dir).expanduser()
    directory = root
    if output.run_id and is_there(root / output.run_id):
        directory = root / output.run_id
    if trainer.keep_checkpoints == "all":
        checkpoints = trainer.steps // (trainer.save_every_steps or trainer.steps) + 1
    else:
        checkpoints = trainer.keep_checkpoints + 2  # the best one, and the next before an old one is deleted
    needed = max(GIB, checkpoints * (checkpoint_bytes or 0))
    yield free_space("output space", root, needed)
    finding = writable("output", directory, "Set output.root_dir to a directory you may write to.")
    yield finding
    if finding.status != "pass":
        return
    yield file_system(nearest_directory(directory))
    if time_writing:
        yield write_speed(nearest_directory(directory))


def free_space(name: str, directory: Path, needed_bytes: int) -> Finding:
    free = shutil.disk_usage(nearest_directory(directory)).free
    evidence = f"{format_bytes(free)} free at {directory}"
    if free >= needed_bytes:
        return passed(name, evidence)
    return warned(
        name, f"{evidence}; the run may need {format_bytes(needed_bytes)}", "Free some space, or use another volume."
    )


def writable(name: str, directory: Path, remedy: str) -> Finding:
    try:
        check_writable(directory)
    except LlmtrainError as error:
        return failed(name, error.what, remedy)
    note = "" if is_there(directory) else " (it will be created)"
    return passed(name, f"{directory} is writable{note}")


def write_speed(directory: Path, slow_bytes_per_sec: float = SLOW_BYTES_PER_SEC) -> Finding:
    """Speed of a write with fsync, as checkpoints are written."""
    probe = directory / f".llmtrain-{secrets.token_hex(4)}"
    block = secrets.token_bytes(1_000_000)  # random, in case the file system compresses
    started = time.monotonic()
    try:
        with probe.open("xb", buffering=0) as file:
            for _ in range(PROBE_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
        speed = PROBE_BYTES / (time.monotonic() - started)
    except OSError as problem:
        evidence = f"writing {format_bytes(PROBE_BYTES)} to {directory} failed: {problem.strerror or problem}"
        return failed("write speed", evidence, "Checkpoints would fail too: free some space, or use another volume.")
    finally:
        probe.unlink(missing_ok=True)
    evidence = f"{format_bytes(speed)}/s to {directory}"
    if speed >= slow_bytes_per_sec:
        return passed("write speed", evidence)
    return warned(
        "write speed",
        f"{evidence}, below {format_bytes(slow_bytes_per_sec)}/s",
        "Put output.root_dir on a faster volume, save less often, or set trainer.async_save to true.",
    )


def nearest_directory(path: Path) -> Path:
    """The path itself, or the nearest parent directory that exists."""
    return next(directory for directory in (path, *path.absolute().parents) if directory.is_dir())
