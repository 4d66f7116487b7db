"""Values that a platform may give under several names: read each, remember from where, collect what is wrong.

No torch here, and no knowledge of who needs which value: that is identity.py.
"""

import ipaddress
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeVar

from llmtrain.config.distributed import DEFAULT_MASTER_PORT
from llmtrain.config.run import MAX_THREADS
from llmtrain.env import SHARED_CORES
from llmtrain.errors import UsageError

T = TypeVar("T")

BACKENDS = ("c10d", "etcd", "etcd-v2", "static")
# Where the driver lists the GPUs of this machine or container, first existing one counts.
GPU_LISTS = (("/proc/driver/nvidia/gpus", "*"), ("/dev", "nvidia[0-9]*"))

# Names under which the environment gives a thing, the strongest first. All of a row that are set must agree.
NAMES: dict[str, tuple[str, ...]] = {
    "nodes": ("PET_NNODES", "NNODES"),
    "processes_per_node": ("PET_NPROC_PER_NODE", "NPROC_PER_NODE"),
    "node_rank": ("PET_NODE_RANK", "NODE_RANK"),
    "pod_index": ("JOB_COMPLETION_INDEX", "POD_INDEX"),
    "rank": ("RANK",),
    "world_size": ("WORLD_SIZE",),
    "local_rank": ("LOCAL_RANK",),
    "local_world_size": ("LOCAL_WORLD_SIZE",),
    "group_rank": ("GROUP_RANK",),
    "master_addr": ("PET_MASTER_ADDR", "MASTER_ADDR"),
    "master_port": ("PET_MASTER_PORT", "MASTER_PORT"),
    "rdzv_backend": ("PET_RDZV_BACKEND", "RDZV_BACKEND"),
    "rdzv_id": ("PET_RDZV_ID", "RDZV_ID"),
    "rdzv_conf": ("PET_RDZV_CONF", "RDZV_CONF"),
    "rdzv_endpoint": ("PET_RDZV_ENDPOINT", "RDZV_ENDPOINT"),
}


@dataclass(frozen=True)
class Problem:
    what: str
    remedy: str


@dataclass(frozen=True)
class EnvValue(Generic[T]):
    value: T
    source: str

    def __str__(self) -> str:
        return f"{self.source} is {self.value}"


class InvalidValue(ValueError):
    """A text that is not a value of its kind: why, and the remedy."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.why = why
        self.remedy = remedy


class EnvReader:
    """Reads things from options and environment. `spoiled` are those no further check should be built on."""

    def __init__(self, environ: Mapping[str, str], options: Mapping[str, str]) -> None:
        self.environ = environ
        self.options = options
        self.problems: list[Problem] = []
        self.sources: dict[str, str] = {}
        self.spoiled: set[str] = set()

    def text(self, name: str) -> str | None:
        """An environment variable; an empty one is as good as unset (manifests often carry those)."""
        return self.environ.get(name, "").strip() or None

    def complain(self, what: str, remedy: str, *things: str) -> None:
        problem = Problem(what, remedy)
        if problem not in self.problems:  # a value may be read for more than one purpose
            self.problems.append(problem)
        self.spoiled.update(things)

    def sound(self, *things: str) -> bool:
        return self.spoiled.isdisjoint(things)

    def find(
        self,
        thing: str,
        parse: Callable[[str], T],
        names: tuple[str, ...] | None = None,
        same: Callable[[T, T], bool] = operator.eq,
    ) -> EnvValue[T] | None:
        """The option if given: it overrides. Else the environment, where names that say the same must agree."""
        rows = [(name, self.text(name)) for name in (names or NAMES[thing])]
        if thing in self.options:
            rows = [(option_name(thing), self.options[thing])]
        found = list(self.parsed(thing, rows, parse))
        for other in found[1:]:
            if not same(found[0].value, other.value):
                self.complain(
                    f"{found[0].source} is {self.text(found[0].source)!r} but {other.source} is "
                    f"{self.text(other.source)!r}: they say the same thing and must agree.",
                    f"Unset {other.source}, or set both to the same value.",
                    thing,
                )
        return found[0] if found else None

    def parsed(
        self, thing: str, rows: list[tuple[str, str | None]], parse: Callable[[str], T]
    ) -> Iterator[EnvValue[T]]:
        for source, text in rows:
            if text is None:
                continue
            try:
                yield EnvValue(parse(text), source)
            except InvalidValue as error:
                self.complain(f"{source} is {text!r}, {error.why}.", error.remedy, thing)

    def settle(self, thing: str, *candidates: EnvValue[T] | None) -> T | None:
        """The first candidate there is; its source is remembered."""
        first = next((candidate for candidate in candidates if candidate is not None), None)
        if first is None:
            return None
        self.sources[thing] = first.source
        return first.value

    def raise_problems(self) -> None:
        """All problems in one error, each with its remedy."""
        if not self.problems:
            return
        count = len(self.problems)
        lines = "".join(f"\n  - {problem.what}\n    {problem.remedy}" for problem in self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} with what this process was told about its place in the run:"
        error = UsageError(head + lines)
        error.details["problems"] = [asdict(problem) for problem in self.problems]
        raise error


def option_name(thing: str) -> str:
    return "--" + thing.replace("_", "-")


def from_config(field: str, value: T | None) -> EnvValue[T] | None:
    return None if value is None else EnvValue(value, f"distributed.{field}")


def number(text: str) -> int:
    """A count from 0: a rank or an index."""
    if not re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
        raise InvalidValue("which is no number", "Set it to a whole number from 0, or unset it.")
    if int(text) < 0:
        raise InvalidValue("which is negative", "Set it to a whole number from 0, or unset it.")
    return int(text)


def size(text: str) -> int:
    value = number(text)
    if value == 0:
        raise InvalidValue("which must be at least 1", "Set it to a whole number from 1, or unset it.")
    return value


def node_range(text: str) -> tuple[int, int]:
    """`2`, or `2:4` for a run that goes on with two to four nodes."""
    low, colon, high = text.partition(":")
    fewest, most = size(low), size(high if colon else low)
    if fewest > most:
        raise InvalidValue("whose first number is above the second", "Write the fewest nodes first, such as 2:4.")
    return fewest, most


def processes(text: str, environ: Mapping[str, str]) -> int:
    """A number, or `auto` (one for each GPU, else one), `gpu` (one for each GPU), `cpu` (one for each core)."""
    if text == "cpu":
        return usable_cores()
    if text in ("auto", "gpu"):
        gpus = gpu_count(environ)
        if text == "gpu" and not gpus:
            raise InvalidValue("but this machine shows no GPU", "Ask for GPUs (nvidia.com/gpu), or set it to a number.")
        return gpus or 1
    try:
        return size(text)
    except InvalidValue as error:
        raise InvalidValue(error.why, "Set it to a number from 1, or to auto, gpu or cpu.") from None


def port(text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII) or not 1 <= int(text) <= 65535:
        remedy = f"Set it to a number from 1 to 65535; the usual one is {DEFAULT_MASTER_PORT}."
        if "://" in text:
            remedy += " Kubernetes makes such values from a Service's name: set enableServiceLinks: false."
        raise InvalidValue("which is no port", remedy)
    return int(text)


def endpoint(text: str) -> tuple[str, int]:
    """`host:port`, `[IPv6]:port` or a bare host, whose port is the usual one."""
    match = re.fullmatch(r"\[([^\]]+)\](?::([^:]*))?|([^:]+)(?::([^:]*))?", text)
    if match is None:
        if text.count(":") > 1:  # an IPv6 address without brackets has no room for a port
            return text, DEFAULT_MASTER_PORT
        raise InvalidValue("which is no host:port", "Write it as host:port, with pod 0's own name as the host.")
    host, host_port = match[1] or match[3], match[2] or match[4]
    try:
        return host, port(host_port) if host_port else DEFAULT_MASTER_PORT
    except InvalidValue as error:
        raise InvalidValue("whose port is none", error.remedy) from None


def backend(text: str) -> str:
    if text not in BACKENDS:
        raise InvalidValue("which is unknown", f"Known: {', '.join(BACKENDS)}. Prefer c10d: it needs no other service.")
    return text


def settings(text: str) -> dict[str, str]:
    """`k=v,k=v`."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(key.strip() and equals for key, equals, _ in pairs):
        raise InvalidValue("which is not a list of key=value", "Write it as key=value,key=value.")
    return {key.strip(): value.strip() for key, _, value in pairs}


def same_host(one: str, other: str) -> bool:
    """Equal, or the same name written out further: train-0.train and train-0.train.default.svc."""
    short, long = sorted((one.lower().rstrip("."), other.lower().rstrip(".")), key=len)
    return long == short or long.startswith(f"{short}.")


def is_loopback(host: str) -> bool:
    """Whether the host is written as this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_ordinal(hostname: str) -> tuple[str, int] | None:
    """`train-3` or `train-3.service` -> ("train", 3): the names that Indexed Jobs and StatefulSets give pods."""
    match = re.fullmatch(r"(.+)-(\d{1,9})", hostname.partition(".")[0], re.ASCII)
    return (match[1], int(match[2])) if match else None


def gpu_count(environ: Mapping[str, str]) -> int:
    """GPUs that CUDA would show a process, without loading CUDA: its list ends at the first entry that is no device."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        counts = (len(list(Path(folder).glob(pattern))) for folder, pattern in GPU_LISTS)
        return next((count for count in counts if count), 0)
    count = 0
    for entry in visible.split(","):
        if not re.fullmatch(r"\d+|(GPU|MIG)-.+", entry.strip()):
            break
        count += 1
    return count


def usable_cores() -> int:
    """Cores this process may use: its affinity, and in a container its CPU limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return cores


def omp_threads(environment: Mapping[str, str]) -> int | None:
    """The number in OMP_NUM_THREADS, which may be a list for nested loops; None where `node` set it by itself, or where
    it is not a usable number."""
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if SHARED_CORES in environment or not re.fullmatch("[0-9]{1,6}", first):
        return None
    return int(first) if 0 < int(first) <= MAX_THREADS else None


def thread_variables(processes: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that divide the cores among the worker processes of a node: by default each of them would
    use all cores. Empty where the user has set OMP_NUM_THREADS."""
    if processes == 1 or "OMP_NUM_THREADS" in environment:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, usable_cores() // processes)), SHARED_CORES: "1"}
