"""The `distributed` section: strategy, collectives and rendezvous of several processes."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.section import CountOrZero, PositiveInt, Problem, Section

DEFAULT_MASTER_PORT = 29500


def is_host_port(text: str) -> bool:
    """Whether the text is a host name or address (IPv6 in brackets) with a port."""
    match = re.fullmatch(r"(?:[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", text)
    return match is not None and 1 <= int(match[2]) <= 65535


class RendezvousSection(Section):
    """How the pods or machines of a run find each other, in torchrun's terms."""

    backend: Literal["static", "c10d", "etcd-v2"] | None = None
    """`static` (at node rank 0, a fixed number of nodes), `c10d` (at node rank 0, elastic) or `etcd-v2` (at an etcd
    server with the v2 API; extra `etcd`). null means static, or c10d if the number of nodes is elastic."""
    endpoint: str | None = None
    """host:port of the etcd server. Leave null for static and c10d."""


class DistributedSection(Section):
    """Training with several processes. Their number comes from the launcher: `train --processes`, `llmtrain node`,
    torchrun or a Kubernetes job."""

    strategy: Literal["none", "ddp", "fsdp"] = "ddp"
    """`ddp` replicates the model, `fsdp` shards it, `none` refuses more than one process."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective backend. `auto` uses nccl on GPUs and gloo on CPUs."""
    init_method: Annotated[str, Field(pattern=r"^(env://|tcp://[^/:]+:[0-9]+)$")] | None = None
    """torch.distributed init method: env:// or tcp://host:port."""
    timeout_sec: PositiveInt = 1800
    """Collective timeout in seconds. After it the run names the unresponsive rank and exits with code 75."""
    join_timeout_sec: PositiveInt = 1800
    """Timeout in seconds for all processes to join. LLMTRAIN_DIST_TIMEOUT overrides it."""
    master_ready_timeout_sec: PositiveInt = 600
    """Timeout in seconds for the master's name to resolve and its port to answer. LLMTRAIN_MASTER_READY_TIMEOUT
    overrides it."""
    rendezvous: RendezvousSection = RendezvousSection()
    """Rendezvous of `llmtrain node` and `llmtrain launch`. Options of `node` and torchrun's variables override it;
    `train` does not use it."""
    reproducible_reduce: bool = False
    """Sum gradients in a fixed order, so that 1, 2 and 4 processes give the same bits (`ddp` only). The number of
    processes must be a power of two; it needs memory for a few more copies of the gradients."""
    find_unused_parameters: bool = False
    """Let DDP search in each step for parameters that it does not use. Needed only by a model whose first step uses all
    of them and a later one does not; for a model with parameters that are never used it is set automatically."""
    rank: CountOrZero | None = None
    """Rank of this process, if the environment does not set it."""
    world_size: PositiveInt | None = None
    """Number of processes, if the environment does not set it."""
    local_rank: CountOrZero | None = None
    """Rank on this machine, if the environment does not set it."""
    master_addr: str | None = None
    """Address of rank 0, if the environment does not set it."""
    master_port: Annotated[int, Field(gt=0, lt=65536)] | None = None
    """Port of rank 0, if the environment does not set it. null means 29500. Pods use it too, where it must be above
    1023."""

    def problems(self) -> Iterator[Problem]:
        if self.reproducible_reduce and self.strategy == "fsdp":
            yield (
                ("strategy", "reproducible_reduce"),
                "distributed.reproducible_reduce requires distributed.strategy ddp or none, got fsdp, whose gradients "
                "are summed by the collective library.",
            )
        backend = self.rendezvous.backend
        endpoint = self.rendezvous.endpoint
        if backend == "etcd-v2" and endpoint is None:
            yield (
                ("rendezvous",),
                "distributed.rendezvous.backend etcd-v2 requires distributed.rendezvous.endpoint. Set it to host:port "
                "of the etcd server.",
            )
        if endpoint is not None and backend is None:
            yield (
                ("rendezvous",),
                "distributed.rendezvous.endpoint is set, but distributed.rendezvous.backend is null. Set it to "
                "etcd-v2, or leave both out.",
            )
        if endpoint is not None and not is_host_port(endpoint):
            yield (
                ("rendezvous",),
                f"distributed.rendezvous.endpoint must be host:port, such as etcd.default:2379, without http://, got "
                f"{endpoint!r}.",
            )
        if self.rank is not None and self.rank >= (self.world_size or 1):
            yield (
                ("rank", "world_size"),
                f"distributed.rank must be below distributed.world_size {self.world_size or 1}, got {self.rank}.",
            )
