"""Checks of rank, world size, environment variables and versions of this process."""

import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from llmtrain.config.distributed import DistributedSection
from llmtrain.core.env import DIST_TIMEOUT, MASTER_READY_TIMEOUT
from llmtrain.core.findings import Finding, failed, passed
from llmtrain.core.text import one_line, plural
from llmtrain.distributed.platform_env import NAMES
from llmtrain.distributed.process_info import (
    NodeOptions,
    find_node_info,
    find_process_info,
    uses_agent_store,
    validate_environment,
)
from llmtrain.errors import UsageError
from llmtrain.version import __version__

# Shown besides those of rank and world size; none of them holds a secret.
OTHER_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    DIST_TIMEOUT,
    MASTER_READY_TIMEOUT,
    "COLOSSALAI_DIST_TIMEOUT",
    "COLOSSALAI_MASTER_READY_TIMEOUT",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "NCCL_DEBUG",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
)


@dataclass(frozen=True)
class Master:
    host: str
    port: int
    is_hosted_here: bool
    """Whether this process, or the agent of this node, will listen on the port."""


@dataclass(frozen=True)
class Position:
    """Rank and world size of this process; those of a single process if the environment is invalid."""

    world_size: int = 1
    local_world_size: int = 1
    local_rank: int = 0
    node_rank: int | None = 0
    master: Master | None = None
    """None for a single process."""


def find_position(environ: Mapping[str, str], distributed: DistributedSection) -> Position:
    """Position of a process if LOCAL_RANK is set, else of a node. `identity` reports problems of the environment."""
    hostname = socket.gethostname()
    try:
        if environ.get("LOCAL_RANK"):
            process = find_process_info(environ, hostname, distributed)
            is_hosted_here = process.rank == 0 and not uses_agent_store(environ)
            master = Master(process.master_addr, process.master_port, is_hosted_here)
            return Position(
                world_size=process.world_size,
                local_world_size=process.local_world_size,
                local_rank=process.local_rank,
                node_rank=process.node_rank,
                master=master,
            )
        node = find_node_info(environ, NodeOptions(), hostname, distributed)
    except UsageError:
        return Position()
    position = Position(node.world_size, node.processes_per_node, node_rank=node.node_rank)
    if node.max_nodes == 1:
        return position
    return replace(position, master=Master(node.master_addr, node.master_port, node.node_rank == 0))


def identity(environ: Mapping[str, str], distributed: DistributedSection) -> Iterator[Finding]:
    problems = validate_environment(environ, socket.gethostname(), distributed)
    for problem in problems:
        yield failed("identity", problem.what, problem.remedy)
    if problems:
        return
    position = find_position(environ, distributed)
    if position.master is None and position.world_size == 1:
        yield passed("identity", "a single process")
        return
    rank = "?" if position.node_rank is None else position.node_rank
    parts = [
        f"world size {position.world_size}",
        f"node rank {rank}",
        f"{plural(position.local_world_size, 'process')} on this node",
    ]
    if position.master:
        parts.append(f"master {position.master.host}:{position.master.port}")
    yield passed("identity", ", ".join(parts))


def variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    names = [*chain.from_iterable(NAMES.values()), *OTHER_VARIABLES]
    settings = [f"{name}={environ[name]}" for name in names if name in environ]
    yield passed("environment", " ".join(settings) or "no variables of torchrun, NCCL, gloo or a platform are set")


def versions() -> Iterator[Finding]:
    own = f"llmtrain {__version__}, python {platform.python_version()}"
    try:
        import torch
    except Exception as problem:  # a broken installation raises any type: OSError for a missing library
        why = f"{type(problem).__name__}: {one_line(problem, 300)}"
        yield failed("versions", f"{own}; torch cannot be imported: {why}", f"Install torch for {sys.executable}.")
        return
    yield passed("versions", f"{own}, torch {torch.__version__}, {platform.system()} {platform.machine()}")
