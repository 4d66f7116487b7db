"""Rank and world size of this process, or of this node, on every platform.

torchrun, Indexed Jobs, StatefulSets, PyTorchJobs, TrainJobs, hand-written manifests and the config each use other
names. Each value has a list of sources; the first that is set is used. All problems are reported at once, because a
pod that fails once per mistake costs an hour.
"""

import functools
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from llmtrain.config.distributed import DistributedSection
from llmtrain.distributed.node_info import (
    NodeInfo,
    NodeOptions,
    check_index,
    check_local_rank,
    format_range,
    read_master,
    read_node,
)
from llmtrain.distributed.platform_env import (
    NAMES,
    EnvReader,
    EnvValue,
    Problem,
    from_config,
    is_loopback,
    parse_count,
    parse_node_range,
    parse_processes,
    parse_rank,
)
from llmtrain.errors import UsageError

__all__ = [
    "NodeInfo",
    "NodeOptions",
    "Problem",
    "ProcessInfo",
    "find_node_info",
    "find_process_info",
    "uses_agent_store",
    "validate_environment",
]

# The variables that torchrun sets for a process. All others describe the pod, and torchrun's flags override them.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
NODE_LEVEL = {"RANK", "WORLD_SIZE", *NAMES["nodes"], *NAMES["node_rank"], *NAMES["pod_index"]}


@dataclass(frozen=True)
class ProcessInfo:
    """One process of the run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    is_launched: bool  # False: no source mentions other processes; the world size is 1
    sources: dict[str, str]


def uses_agent_store(environ: Mapping[str, str]) -> bool:
    """Whether the elastic agent (of torchrun or `llmtrain node`) listens on the master port, instead of rank 0."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_worker(environ: Mapping[str, str]) -> bool:
    """Whether a launcher, such as torchrun, has started this process as one of several. The variables of a pod alone
    do not say so: a command that is typed in one has no peers."""
    return all(environ.get(name, "").strip() for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def find_node_info(
    environ: Mapping[str, str], options: NodeOptions, hostname: str, distributed: DistributedSection
) -> NodeInfo:
    """Describe this node, for the process that starts the workers. Raises UsageError with all problems."""
    passed = {}
    for key, value in asdict(options).items():
        if value is not None:
            passed[key] = str(value)
    reader = EnvReader(environ, passed)
    node = read_node(reader, hostname, distributed)
    reader.raise_problems()
    return node


def find_process_info(environ: Mapping[str, str], hostname: str, distributed: DistributedSection) -> ProcessInfo:
    """Describe this training process. Raises UsageError with all problems."""
    reader, process = _read_process_info(environ, hostname, distributed)
    reader.raise_problems()
    return process


class InvalidEnvironment(UsageError, RuntimeError):
    """The environment of a script; a RuntimeError too, which scripts that check it themselves raise and catch."""


def validate_environment(
    environ: Mapping[str, str] | None = None,
    hostname: str | None = None,
    distributed: DistributedSection | None = None,
) -> list[Problem]:
    """Problems of the environment of a script; empty if there are none.

    With LOCAL_RANK set the environment is checked as that of a training process, else as that of a node.
    """
    return _read_environment(environ, hostname, distributed).problems


def require_environment(
    environ: Mapping[str, str] | None = None,
    hostname: str | None = None,
    distributed: DistributedSection | None = None,
) -> dict[str, str]:
    """Raise InvalidEnvironment, a RuntimeError, with all problems of the environment, else return the variables that
    define this process."""
    reader = _read_environment(environ, hostname, distributed)
    reader.raise_problems(InvalidEnvironment)
    variables = {}
    for names in NAMES.values():
        for name in names:
            if reader.text(name):
                variables[name] = reader.environ[name]
    return variables


def _read_environment(
    environ: Mapping[str, str] | None, hostname: str | None, distributed: DistributedSection | None
) -> EnvReader:
    if environ is None:
        environ = os.environ
    hostname = hostname or socket.gethostname()
    distributed = distributed or DistributedSection()
    if environ.get("LOCAL_RANK"):
        return _read_process_info(environ, hostname, distributed)[0]
    reader = EnvReader(environ, {})
    read_node(reader, hostname, distributed)
    return reader


def _read_process_info(
    environ: Mapping[str, str], hostname: str, distributed: DistributedSection
) -> tuple[EnvReader, ProcessInfo]:
    variables = {name for name, text in environ.items() if text.strip()}
    is_torchrun = "LOCAL_RANK" in variables and bool(variables & {"GROUP_RANK", "TORCHELASTIC_RUN_ID"})
    if is_torchrun:
        environ = {name: environ[name] for name in TORCHRUN if name in environ}
    reader = EnvReader(environ, {})
    in_config = distributed.rank is not None and distributed.local_rank is not None and not variables & NODE_LEVEL
    if is_torchrun or variables >= {"LOCAL_RANK", "RANK"} or in_config:
        return reader, _read_ranked_process(reader, hostname, distributed, is_torchrun=is_torchrun)
    node = read_node(reader, hostname, distributed, is_train=True)
    local = reader.find("local_rank", parse_rank) or from_config("local_rank", distributed.local_rank)
    per_node = node.processes_per_node
    check_local_rank(reader, local, per_node)
    if per_node > 1 and local is None and reader.is_valid("processes_per_node"):
        reader.add_problem(
            f"{reader.sources['processes_per_node']} is {per_node}, but LOCAL_RANK of this process is not set.",
            "Run `llmtrain node` instead: it starts the processes of this pod.",
        )
    if node.is_elastic:
        reader.add_problem(
            f"{reader.sources['nodes']} is {node.min_nodes}:{node.max_nodes}, but a training process needs a fixed "
            "number of nodes.",
            "Run `llmtrain node` instead: the rendezvous decides the number.",
        )
    local_rank = reader.resolve("local_rank", local, EnvValue(0, "default")) or 0
    node_rank = node.node_rank or 0
    sources = reader.sources | {
        "rank": reader.sources.get("node_rank", "default"),
        "world_size": reader.sources["nodes"],
        "local_world_size": reader.sources["processes_per_node"],
    }
    return reader, ProcessInfo(
        rank=node_rank * per_node + local_rank,
        world_size=node.world_size,
        local_rank=local_rank,
        local_world_size=per_node,
        node_rank=node_rank,
        master_addr=node.master_addr,
        master_port=node.master_port,
        is_launched=reader.sources["nodes"] != "default",
        sources=sources,
    )


def _read_ranked_process(
    reader: EnvReader, hostname: str, distributed: DistributedSection, *, is_torchrun: bool
) -> ProcessInfo:
    """A process whose own rank is set: by torchrun, by hand, or in the config."""
    from_variable = reader.find("rank", parse_rank)
    rank = reader.resolve("rank", from_variable, from_config("rank", distributed.rank)) or 0
    local = reader.find("local_rank", parse_rank) or from_config("local_rank", distributed.local_rank)
    local_rank = reader.resolve("local_rank", local) or 0
    nodes = reader.find("nodes", parse_node_range)
    local_size = reader.find("local_world_size", parse_count)
    if local_size is None:
        local_size = reader.find("processes_per_node", functools.partial(parse_processes, environ=reader.environ))
    candidates = [reader.find("world_size", parse_count), from_config("world_size", distributed.world_size)]
    if nodes:
        per_node = 1
        if local_size:
            per_node = local_size.value
        candidates.append(EnvValue(nodes.value[0] * per_node, nodes.source))
    if not from_variable:
        candidates.append(EnvValue(1, "default"))
    world_size = reader.resolve("world_size", *candidates)
    if world_size is None and reader.is_valid("rank", "world_size"):
        reader.add_problem(
            f"{from_variable}, but WORLD_SIZE is not set.",
            "Set WORLD_SIZE too, or unset RANK and LOCAL_RANK to train in one process.",
            "world_size",
        )
    peers = None
    if world_size is not None and world_size > 1:
        peers = f"{world_size} processes ({reader.sources['world_size']})"
    master_addr, master_port = read_master(reader, hostname, distributed, peers=peers)
    # With the master on this machine and both ranks equal, all processes are on this machine.
    is_one_machine = rank == local_rank and is_loopback(master_addr)
    all_local = None
    if is_one_machine:
        all_local = EnvValue(world_size or 1, "world_size")
    per_node = reader.resolve("local_world_size", local_size, all_local, EnvValue(1, "default")) or 1
    node = reader.find("group_rank", parse_rank) or reader.find("node_rank", parse_rank)
    derived = EnvValue(rank // per_node, reader.sources.get("rank", "default"))
    node_rank = reader.resolve("node_rank", node, derived) or 0
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
    index = reader.find("pod_index", parse_rank)
    if node or per_node == 1:
        check_index(reader, node or derived, index)
    else:
        _check_derived_node(reader, process, index, is_one_machine=is_one_machine)
    if reader.is_valid("rank", "world_size"):
        _check_process(reader, process, nodes, is_torchrun=is_torchrun)
    return process


def _check_derived_node(
    reader: EnvReader, process: ProcessInfo, index: EnvValue[int] | None, *, is_one_machine: bool
) -> None:
    """Like check_index, for a node rank that follows from RANK, which counts processes."""
    if index is None or process.node_rank >= index.value:
        return
    source = reader.sources
    if is_one_machine:
        addr = source["master_addr"]
        where = f"{addr} is {process.master_addr}, so that all {process.world_size} processes are on this machine"
        remedy = f"Set {addr} to the DNS name of pod 0, and LOCAL_RANK to the number of the process in its pod."
    else:
        per_node = f"{process.local_world_size} processes per node ({source['local_world_size']})"
        where = f"with {per_node} that is a process of node {process.node_rank}"
        remedy = f"Set {source['rank']} to {index.source} x processes per node + LOCAL_RANK."
    reader.add_problem(
        f"{source['rank']} is {process.rank} and {where}, but {index}: two pods of the job would have the same rank.",
        remedy,
        "node_rank",
    )


def _check_process(
    reader: EnvReader, process: ProcessInfo, nodes: EnvValue[tuple[int, int]] | None, *, is_torchrun: bool
) -> None:
    source = reader.sources
    if process.rank >= process.world_size:
        reader.add_problem(
            f"{source['rank']} is {process.rank}, but the run has {process.world_size} processes "
            f"({source['world_size']}): ranks are 0 to {process.world_size - 1}.",
            "Set a different rank for each process, or raise the world size.",
            "rank",
        )
    if is_torchrun or not reader.is_valid("nodes", "local_world_size", "processes_per_node", "local_rank", "node_rank"):
        return  # torchrun's numbers are consistent, also where nodes have different numbers of processes
    count, rest = divmod(process.world_size, process.local_world_size)
    if rest or (nodes and not nodes.value[0] <= count <= nodes.value[1]):
        count_text = "a number of nodes"
        if nodes:
            count_text = f"{format_range(nodes.value)} nodes ({nodes.source})"
        reader.add_problem(
            f"{source['world_size']} is {process.world_size}, which is not {count_text} x {process.local_world_size} "
            f"processes per node ({source['local_world_size']}).",
            "Set WORLD_SIZE to nodes x processes per node.",
        )
    expected = process.node_rank * process.local_world_size + process.local_rank
    if reader.is_valid("rank") and process.rank != expected:
        reader.add_problem(
            f"{source['rank']} is {process.rank}, but node {process.node_rank} ({source['node_rank']}) x "
            f"{process.local_world_size} processes per node ({source['local_world_size']}) + local rank "
            f"{process.local_rank} is {expected}.",
            "Set RANK to node rank x processes per node + LOCAL_RANK, or use torchrun or `llmtrain node`.",
        )
