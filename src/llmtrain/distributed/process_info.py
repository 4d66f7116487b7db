"""Who am I: the place of this node, or the process of this process, from whatever the platform gives.

Every platform says it in its own words (torchrun, an Indexed Job, a StatefulSet, PyTorchJob, TrainJob, a manifest
written by hand, the config). Each value has its list of sources, the first that is set wins, and everything wrong
is reported at once: a pod that fails once for each mistake costs an hour.
"""

import functools
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from llmtrain.config.distributed import DistributedSection
from llmtrain.distributed.env import (
    NAMES,
    EnvReader,
    EnvValue,
    Problem,
    from_config,
    is_loopback,
    node_range,
    number,
    processes,
    size,
)
from llmtrain.distributed.node_info import (
    NodeInfo,
    NodeOptions,
    check_index,
    check_local_rank,
    in_words,
    read_master,
    read_node,
)

__all__ = [
    "NodeInfo",
    "NodeOptions",
    "Problem",
    "ProcessInfo",
    "find_node_info",
    "find_process_info",
    "has_agents_store",
    "validate_environment",
]

# What torchrun tells a process. What the pod was told besides is about the pod, and torchrun's flags may overrule it.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
NODE_LEVEL = {"RANK", "WORLD_SIZE", *NAMES["nodes"], *NAMES["node_rank"], *NAMES["pod_index"]}


@dataclass(frozen=True)
class ProcessInfo:
    """One process among those of the run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    is_launched: bool  # False: nothing spoke of other processes, this is a world of one
    sources: dict[str, str]


def has_agents_store(environ: Mapping[str, str]) -> bool:
    """Whether the launcher's own process, torchrun's or that of `node`, listens on the master's port; else rank 0."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def find_node_info(
    environ: Mapping[str, str], given: NodeOptions, hostname: str, distributed: DistributedSection
) -> NodeInfo:
    """The place of this node, for the one process that starts the others of its node."""
    options = {thing: str(value) for thing, value in asdict(given).items() if value is not None}
    reader = EnvReader(environ, options)
    place = read_node(reader, hostname, distributed)
    reader.raise_problems()
    return place


def find_process_info(environ: Mapping[str, str], hostname: str, distributed: DistributedSection) -> ProcessInfo:
    """The process of this process, which trains."""
    reader, process = _read_seat(environ, hostname, distributed)
    reader.raise_problems()
    return process


def validate_environment(
    environ: Mapping[str, str] | None = None,
    hostname: str | None = None,
    distributed: DistributedSection | None = None,
) -> list[Problem]:
    """What is wrong with the environment of one's own script; empty when all is well.

    With LOCAL_RANK set it is judged as one training process, else as the only process of its node.
    """
    return _read_environment(environ, hostname, distributed).problems


def require_environment(
    environ: Mapping[str, str] | None = None,
    hostname: str | None = None,
    distributed: DistributedSection | None = None,
) -> dict[str, str]:
    """validate_environment for a script that cannot go on with a bad one: raises UsageError with all problems, else
    returns the variables that say who this process is."""
    reader = _read_environment(environ, hostname, distributed)
    reader.raise_problems()
    names = (name for row in NAMES.values() for name in row)
    return {name: reader.environ[name] for name in names if reader.environ.get(name, "").strip()}


def _read_environment(
    environ: Mapping[str, str] | None, hostname: str | None, distributed: DistributedSection | None
) -> EnvReader:
    environ = os.environ if environ is None else environ
    hostname = hostname or socket.gethostname()
    distributed = distributed or DistributedSection()
    if environ.get("LOCAL_RANK"):
        return _read_seat(environ, hostname, distributed)[0]
    reader = EnvReader(environ, {})
    read_node(reader, hostname, distributed)
    return reader


def _read_seat(
    environ: Mapping[str, str], hostname: str, distributed: DistributedSection
) -> tuple[EnvReader, ProcessInfo]:
    said = {name for name, text in environ.items() if text.strip()}
    is_torchrun = "LOCAL_RANK" in said and bool(said & {"GROUP_RANK", "TORCHELASTIC_RUN_ID"})
    if is_torchrun:
        environ = {name: environ[name] for name in TORCHRUN if name in environ}
    reader = EnvReader(environ, {})
    in_config = distributed.rank is not None and distributed.local_rank is not None and not said & NODE_LEVEL
    if is_torchrun or said >= {"LOCAL_RANK", "RANK"} or in_config:
        return reader, _read_process(reader, hostname, distributed, is_torchrun=is_torchrun)
    place = read_node(reader, hostname, distributed, is_train=True)
    local = reader.find("local_rank", number) or from_config("local_rank", distributed.local_rank)
    per_node = place.processes_per_node
    check_local_rank(reader, local, per_node)
    if per_node > 1 and local is None and reader.sound("processes_per_node"):
        reader.complain(
            f"{reader.sources['processes_per_node']} asks for {per_node} processes a node, but LOCAL_RANK is not set: "
            "this is not one of them.",
            "Run `llmtrain node` instead: it starts the processes of this pod.",
        )
    if place.is_elastic:
        reader.complain(
            f"{reader.sources['nodes']} is {place.min_nodes}:{place.max_nodes}, but a process has to know how many "
            "there are.",
            "Run `llmtrain node` instead: it settles the number when the nodes meet.",
        )
    local_rank = reader.settle("local_rank", local, EnvValue(0, "default")) or 0
    node_rank = place.node_rank or 0
    sources = reader.sources | {
        "rank": reader.sources.get("node_rank", "default"),
        "world_size": reader.sources["nodes"],
        "local_world_size": reader.sources["processes_per_node"],
    }
    return reader, ProcessInfo(
        rank=node_rank * per_node + local_rank,
        world_size=place.world_size,
        local_rank=local_rank,
        local_world_size=per_node,
        node_rank=node_rank,
        master_addr=place.master_addr,
        master_port=place.master_port,
        is_launched=reader.sources["nodes"] != "default",
        sources=sources,
    )


def _read_process(
    reader: EnvReader, hostname: str, distributed: DistributedSection, *, is_torchrun: bool
) -> ProcessInfo:
    """Each process was told its own rank: by torchrun, by hand, or by the config."""
    ranked = reader.find("rank", number)
    rank = reader.settle("rank", ranked, from_config("rank", distributed.rank)) or 0
    local = reader.find("local_rank", number) or from_config("local_rank", distributed.local_rank)
    local_rank = reader.settle("local_rank", local) or 0
    nodes = reader.find("nodes", node_range)
    on_node = reader.find("local_world_size", size)
    if on_node is None:
        on_node = reader.find("processes_per_node", functools.partial(processes, environ=reader.environ))
    world_size = reader.settle(
        "world_size",
        reader.find("world_size", size),
        from_config("world_size", distributed.world_size),
        EnvValue(nodes.value[0] * (on_node.value if on_node else 1), nodes.source) if nodes else None,
        None if ranked else EnvValue(1, "default"),
    )
    if world_size is None and reader.sound("rank", "world_size"):
        reader.complain(
            f"{ranked}, but WORLD_SIZE is not set: nothing says how many processes there are.",
            "Set WORLD_SIZE too, or unset RANK and LOCAL_RANK to train in one process.",
            "world_size",
        )
    company = f"{reader.sources['world_size']} says there are {world_size} processes" if (world_size or 1) > 1 else None
    master_addr, master_port = read_master(reader, hostname, distributed, company=company)
    # With the master on this machine and both ranks equal, everybody is here.
    everybody = EnvValue(world_size or 1, "world_size") if rank == local_rank and is_loopback(master_addr) else None
    per_node = reader.settle("local_world_size", on_node, everybody, EnvValue(1, "default")) or 1
    node = reader.find("group_rank", number) or reader.find("node_rank", number)
    shared = EnvValue(rank // per_node, reader.sources.get("rank", "default"))
    node_rank = reader.settle("node_rank", node, shared) or 0
    process = ProcessInfo(
        rank=rank,
        world_size=world_size or 1,
        local_rank=local_rank,
        local_world_size=per_node,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        is_launched=True,
        sources=dict(reader.sources),
    )
    check_local_rank(reader, local, per_node)
    check_index(reader, node or shared, reader.find("pod_index", number))
    if reader.sound("rank", "world_size"):
        _check_process(reader, process, nodes, is_torchrun=is_torchrun)
    return process


def _check_process(
    reader: EnvReader, process: ProcessInfo, nodes: EnvValue[tuple[int, int]] | None, *, is_torchrun: bool
) -> None:
    source = reader.sources
    if process.rank >= process.world_size:
        reader.complain(
            f"{source['rank']} is {process.rank}, but there are {process.world_size} processes "
            f"({source['world_size']}): ranks run from 0 to {process.world_size - 1}.",
            "Give each process its own rank, or raise the world size.",
            "rank",
        )
    if is_torchrun or not reader.sound("nodes", "local_world_size", "processes_per_node", "local_rank", "node_rank"):
        return  # torchrun's own numbers fit, also where nodes have different numbers of processes
    count, rest = divmod(process.world_size, process.local_world_size)
    if rest or (nodes and not nodes.value[0] <= count <= nodes.value[1]):
        told = f"{in_words(nodes.value)} ({nodes.source})" if nodes else "any number of"
        reader.complain(
            f"{source['world_size']} is {process.world_size}, which is not {told} nodes x {process.local_world_size} "
            f"processes per node ({source['local_world_size']}).",
            "Set WORLD_SIZE to nodes x processes per node.",
        )
    expected = process.node_rank * process.local_world_size + process.local_rank
    if reader.sound("rank") and process.rank != expected:
        reader.complain(
            f"{source['rank']} is {process.rank}, but node {process.node_rank} ({source['node_rank']}) x "
            f"{process.local_world_size} processes per node ({source['local_world_size']}) + local rank "
            f"{process.local_rank} is {expected}.",
            "Set RANK to node rank x processes per node + LOCAL_RANK, or let torchrun or `llmtrain node` do it.",
        )
