"""Values that platforms set under different variable names: parses them, records their source, collects problems.

What the values mean for a node or a process is decided in node_info.py and process_info.py.
"""

import ipaddress
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

from llmtrain.config.distributed import DEFAULT_MASTER_PORT
from llmtrain.core.text import plural
from llmtrain.distributed.machine_limits import gpu_count, usable_cores
from llmtrain.errors import UsageError

T = TypeVar("T")

BACKENDS = ("c10d", "etcd", "etcd-v2", "static")

# Environment variables of each value, highest precedence first. Those of a row that are set must agree.
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
    """A text that does not parse. `problem` completes the sentence that begins with the name of the variable."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


class EnvReader:
    """Reads values from options and environment. Values in `invalid` are skipped by later checks."""

    def __init__(self, environ: Mapping[str, str], options: Mapping[str, str]) -> None:
        self.environ = environ
        self.options = options
        self.problems: list[Problem] = []
        self.sources: dict[str, str] = {}
        self.invalid: set[str] = set()

    def text(self, name: str) -> str | None:
        """An environment variable; None if it is unset or empty (manifests often set empty ones)."""
        return self.environ.get(name, "").strip() or None

    def add_problem(self, what: str, remedy: str, *keys: str) -> None:
        problem = Problem(what, remedy)
        if problem not in self.problems:  # a value may be read more than once
            self.problems.append(problem)
        self.invalid.update(keys)

    def is_valid(self, *keys: str) -> bool:
        return self.invalid.isdisjoint(keys)

    def find(
        self,
        key: str,
        parse: Callable[[str], T],
        names: tuple[str, ...] | None = None,
        same: Callable[[T, T], bool] = operator.eq,
    ) -> EnvValue[T] | None:
        """The value of the option if it was passed, else of the environment variables, which must agree."""
        texts = [(name, self.text(name)) for name in (names or NAMES[key])]
        if key in self.options:
            texts = [(option_name(key), self.options[key])]
        values = list(self.parse_all(key, texts, parse))
        for other in values[1:]:
            if not same(values[0].value, other.value):
                self.add_problem(
                    f"{values[0].source} is {self.text(values[0].source)!r} but {other.source} is "
                    f"{self.text(other.source)!r}: they mean the same and must agree.",
                    f"Unset {other.source}, or set both to the same value.",
                    key,
                )
        if not values:
            return None
        return values[0]

    def parse_all(
        self, key: str, texts: list[tuple[str, str | None]], parse: Callable[[str], T]
    ) -> Iterator[EnvValue[T]]:
        """The values of (source, text) that parse; the others become problems."""
        for source, text in texts:
            if text is None:
                continue
            try:
                yield EnvValue(parse(text), source)
            except InvalidValue as error:
                self.add_problem(f"{source} {error.problem}.", error.remedy, key)

    def resolve(self, key: str, *candidates: EnvValue[T] | None) -> T | None:
        """The first candidate that is not None; its source is recorded."""
        for candidate in candidates:
            if candidate is not None:
                self.sources[key] = candidate.source
                return candidate.value
        return None

    def raise_problems(self, kind: type[UsageError] = UsageError) -> None:
        """Raise one error with all problems and their remedies."""
        if not self.problems:
            return

        lines = "".join(f"\n  - {problem.what}\n    {problem.remedy}" for problem in self.problems)
        error = kind(f"{plural(len(self.problems), 'problem')} in the distributed environment:{lines}")
        error.details["problems"] = [asdict(problem) for problem in self.problems]
        raise error


def option_name(key: str) -> str:
    return "--" + key.replace("_", "-")


def from_config(field: str, value: T | None) -> EnvValue[T] | None:
    if value is None:
        return None
    return EnvValue(value, f"distributed.{field}")


# The patterns below allow 18 digits: int() refuses texts of more than 4,300, and no number here is that large. ASCII:
# \d would also match the digits of other scripts.


def parse_rank(text: str) -> int:
    """A rank or an index, from 0."""
    if not re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII) or int(text) < 0:
        raise InvalidValue(f"must be an integer from 0, got {text!r}", "Set it to an integer from 0, or unset it.")
    return int(text)


def parse_count(text: str) -> int:
    """A number of nodes or processes, from 1."""
    if not re.fullmatch(r"[+]?\d{1,18}", text, re.ASCII) or int(text) < 1:
        raise InvalidValue(f"must be an integer from 1, got {text!r}", "Set it to an integer from 1, or unset it.")
    return int(text)


def parse_node_range(text: str) -> tuple[int, int]:
    """`2`, or `2:4` for an elastic job with two to four nodes."""
    low, colon, high = text.partition(":")
    try:
        fewest = parse_count(low)
        most = fewest
        if colon:
            most = parse_count(high)
    except InvalidValue as error:
        raise InvalidValue(f"must be an integer from 1, or MIN:MAX, got {text!r}", error.remedy) from None
    if fewest > most:
        raise InvalidValue(f"must be MIN:MAX with MIN <= MAX, got {text!r}", "Write it as MIN:MAX, such as 2:4.")
    return fewest, most


def parse_processes(text: str, environ: Mapping[str, str]) -> int:
    """A number, `auto` (one per GPU, or one without GPUs), `gpu` (one per GPU) or `cpu` (one per core)."""
    if text == "cpu":
        return usable_cores()
    if text in ("auto", "gpu"):
        gpus = gpu_count(environ)
        if text == "gpu" and not gpus:
            raise InvalidValue(
                f"is {text!r}, but this machine has no visible GPU", "Request nvidia.com/gpu, or set it to a number."
            )
        return gpus or 1
    try:
        return parse_count(text)
    except InvalidValue:
        raise InvalidValue(
            f"must be an integer from 1, auto, gpu or cpu, got {text!r}",
            "Set it to the number of processes, or to auto, gpu or cpu.",
        ) from None


def parse_port(text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII) or not 1 <= int(text) <= 65535:
        remedy = f"Set it to a port number, such as {DEFAULT_MASTER_PORT}."
        if "://" in text:
            remedy += " Kubernetes injects such values for Services: set enableServiceLinks: false."
        raise InvalidValue(f"must be a port from 1 to 65535, got {text!r}", remedy)
    return int(text)


def parse_endpoint(text: str) -> tuple[str, int]:
    """`host:port`, `[IPv6]:port`, or a host with the default port."""
    match = re.fullmatch(r"\[([^\]]+)\](?::([^:]*))?|([^:]+)(?::([^:]*))?", text)
    if match is None:
        if text.count(":") > 1:  # an IPv6 address without brackets cannot have a port
            return text, DEFAULT_MASTER_PORT
        raise InvalidValue(
            f"must be host:port, got {text!r}", "Set it to host:port, with the DNS name of pod 0 as host."
        )
    host = match[1] or match[3]
    host_port = match[2] or match[4]
    if not host_port:
        return host, DEFAULT_MASTER_PORT
    try:
        return host, parse_port(host_port)
    except InvalidValue as error:
        raise InvalidValue(f"has an invalid port: {text!r}", error.remedy) from None


def parse_backend(text: str) -> str:
    if text not in BACKENDS:
        raise InvalidValue(
            f"must be one of {', '.join(BACKENDS)}, got {text!r}", "Prefer c10d: it needs no other service."
        )
    return text


def parse_settings(text: str) -> dict[str, str]:
    """`key=value,key=value`"""
    settings = {}
    for pair in text.split(","):
        key, equals, value = pair.partition("=")
        if not key.strip() or not equals:
            raise InvalidValue(f"must be a list of key=value, got {text!r}", "Write it as key=value,key=value.")
        settings[key.strip()] = value.strip()
    return settings


def same_host(one: str, other: str) -> bool:
    """Whether the names are equal, or one is the other with more domains: train-0.train and train-0.train.default."""
    short, long = sorted((one.lower().rstrip("."), other.lower().rstrip(".")), key=len)
    return long == short or long.startswith(f"{short}.")


def is_loopback(host: str) -> bool:
    """Whether the host is a loopback address or `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_ordinal(hostname: str) -> tuple[str, int] | None:
    """`train-3` or `train-3.service` -> ("train", 3): host names of pods of Indexed Jobs and StatefulSets."""
    match = re.fullmatch(r"(.+)-(\d{1,9})", hostname.partition(".")[0], re.ASCII)
    if match is None:
        return None
    return match[1], int(match[2])
