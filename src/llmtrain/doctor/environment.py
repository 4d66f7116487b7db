"""Who this process was told it is, and with which versions it runs."""

import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import llmtrain
from llmtrain.config.distributed import DistributedSection
from llmtrain.distributed.env import NAMES
from llmtrain.distributed.process_info import (
    NodeOptions,
    find_node_info,
    find_process_info,
    has_agents_store,
    validate_environment,
)
from llmtrain.env import DIST_TIMEOUT, MASTER_READY_TIMEOUT
from llmtrain.errors import UsageError
from llmtrain.findings import Finding, failed, passed
from llmtrain.text import one_line, plural

# Worth showing besides what says who a process is; nothing in here is ever a secret.
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
    """This very process, or this node's, will listen on the port."""


@dataclass(frozen=True)
class Spot:
    """Where this process is, as far as its environment tells; a lone process where that makes no sense."""

    world_size: int = 1
    local_world_size: int = 1
    local_rank: int = 0
    node_rank: int | None = 0
    master: Master | None = None
    """None: there is nobody to meet."""


def find_spot(environ: Mapping[str, str], distributed: DistributedSection) -> Spot:
    """As a process with LOCAL_RANK, as a node without. What is wrong with the environment is told by `identity`."""
    hostname = socket.gethostname()
    try:
        if environ.get("LOCAL_RANK"):
            process = find_process_info(environ, hostname, distributed)
            is_hosted_here = process.rank == 0 and not has_agents_store(environ)
            master = Master(process.master_addr, process.master_port, is_hosted_here)
            return Spot(
                process.world_size,
                process.local_world_size,
                process.local_rank,
                process.node_rank,
                master,
            )
        place = find_node_info(environ, NodeOptions(), hostname, distributed)
    except UsageError:
        return Spot()
    master = Master(place.master_addr, place.master_port, place.node_rank == 0)
    is_alone = place.max_nodes == 1
    return Spot(place.world_size, place.processes_per_node, 0, place.node_rank, None if is_alone else master)


def identity(environ: Mapping[str, str], distributed: DistributedSection) -> Iterator[Finding]:
    problems = validate_environment(environ, socket.gethostname(), distributed)
    for problem in problems:
        yield failed("identity", problem.what, problem.remedy)
    if problems:
        return
    spot = find_spot(environ, distributed)
    if spot.master is None and spot.world_size == 1:
        yield passed("identity", "a lone process: nothing speaks of others")
    else:
        rank = "?" if spot.node_rank is None else spot.node_rank
        where = f"node {rank}, {plural(spot.local_world_size, 'process')} on it"
        meeting = f", meeting at {spot.master.host}:{spot.master.port}" if spot.master else ""
        yield passed("identity", f"one of {plural(spot.world_size, 'process')}, {where}{meeting}")


def variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    names = [name for row in NAMES.values() for name in row] + list(OTHER_VARIABLES)
    told = [f"{name}={environ[name]}" for name in names if name in environ]
    yield passed("environment", " ".join(told) or "no variable of torchrun, NCCL, gloo or a platform is set")


def versions() -> Iterator[Finding]:
    own = f"llmtrain {llmtrain.__version__}, python {platform.python_version()}"
    try:
        import torch
    except Exception as problem:  # a broken installation raises anything: OSError for a missing library
        why = f"{type(problem).__name__}: {one_line(problem, 300)}"
        yield failed("versions", f"{own}; torch cannot be imported: {why}", f"Install torch for {sys.executable}.")
        return
    yield passed("versions", f"{own}, torch {torch.__version__}, {platform.system()} {platform.machine()}")
