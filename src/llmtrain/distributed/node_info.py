"""Rank, size and master of this node, from options, environment, config and hostname.

Each value has a list of sources; the first that is set is used. Problems are collected in the reader, and raised by
process_info.py.
"""

import functools
from dataclasses import dataclass

from llmtrain.config.distributed import DEFAULT_MASTER_PORT, DistributedSection, RendezvousSection
from llmtrain.core.text import plural
from llmtrain.distributed.platform_env import (
    NAMES,
    EnvReader,
    EnvValue,
    from_config,
    parse_backend,
    parse_count,
    parse_endpoint,
    parse_node_range,
    parse_port,
    parse_processes,
    parse_rank,
    parse_settings,
    same_host,
    split_ordinal,
)


@dataclass(frozen=True)
class NodeOptions:
    """Command-line options of `llmtrain node`; they override every other source."""

    nodes: str | None = None
    processes_per_node: str | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_backend: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    rdzv_endpoint: str | None = None


@dataclass(frozen=True)
class NodeInfo:
    """One node of the run."""

    node_rank: int | None  # None: assigned by the rendezvous
    min_nodes: int
    max_nodes: int
    processes_per_node: int
    master_addr: str
    master_port: int
    rdzv_backend: str | None
    rdzv_id: str | None
    rdzv_conf: dict[str, str]
    rdzv_endpoint: str | None
    sources: dict[str, str]  # the variable, option or config field of each value

    @property
    def nodes(self) -> int:
        return self.min_nodes

    @property
    def is_elastic(self) -> bool:
        return self.min_nodes != self.max_nodes

    @property
    def world_size(self) -> int:
        return self.min_nodes * self.processes_per_node


def read_node(reader: EnvReader, hostname: str, distributed: DistributedSection, *, is_train: bool = False) -> NodeInfo:
    if reader.text("TORCHELASTIC_RUN_ID") and not is_train:
        reader.add_problem(
            f"TORCHELASTIC_RUN_ID is {reader.text('TORCHELASTIC_RUN_ID')!r}: `llmtrain node` was started by torchrun.",
            "Run `llmtrain train` under torchrun, or `llmtrain node` without torchrun: node starts the processes.",
        )
    processes = reader.find("processes_per_node", functools.partial(parse_processes, environ=reader.environ))
    per_node = reader.resolve("processes_per_node", processes, EnvValue(1, "default")) or 1
    check_local_rank(reader, reader.find("local_rank", parse_rank), per_node)
    fewest, most = _nodes(reader, per_node, distributed)
    # A training process has been started already and takes no part in the rendezvous.
    rendezvous = RendezvousSection() if is_train else distributed.rendezvous
    backend, conf, endpoint = _read_rendezvous(reader, rendezvous, is_elastic=fewest != most)
    host_port = reader.resolve("rdzv_endpoint", endpoint)
    node_rank = _node_rank(reader, hostname, distributed, per_node, most)
    is_assigned_by_rendezvous = fewest != most or backend not in (None, "static")
    if node_rank is None and (is_train or not is_assigned_by_rendezvous) and reader.is_valid("node_rank", "nodes"):
        reader.add_problem(
            f"The rank of this node is unknown: the run has {most} nodes ({reader.sources['nodes']}), but RANK, "
            f"NODE_RANK and JOB_COMPLETION_INDEX are not set, and the hostname {hostname!r} does not end in a number.",
            "Set NODE_RANK (from 0), or use an Indexed Job or a StatefulSet, which number their pods.",
        )
    peers = None
    if most > 1:
        peers = f"{format_range((fewest, most))} nodes ({reader.sources['nodes']})"
    master_addr, master_port = read_master(reader, hostname, distributed, peers=peers, endpoint=endpoint)
    return NodeInfo(
        node_rank=node_rank,
        min_nodes=fewest,
        max_nodes=most,
        processes_per_node=per_node,
        master_addr=master_addr,
        master_port=master_port,
        rdzv_backend=backend,
        rdzv_id=reader.resolve("rdzv_id", reader.find("rdzv_id", str)),
        rdzv_conf=conf,
        rdzv_endpoint=_join(host_port),
        sources=dict(reader.sources),
    )


def _read_rendezvous(
    reader: EnvReader, config: RendezvousSection, *, is_elastic: bool
) -> tuple[str | None, dict[str, str], EnvValue[tuple[str, int]] | None]:
    """Backend, settings and endpoint of the rendezvous."""
    backend = reader.resolve(
        "rdzv_backend", reader.find("rdzv_backend", parse_backend), from_config("rendezvous.backend", config.backend)
    )
    conf = reader.resolve("rdzv_conf", reader.find("rdzv_conf", parse_settings)) or {}
    if backend == "c10d" and "timeout" in conf:
        reader.add_problem(
            f"{reader.sources['rdzv_conf']} sets timeout={conf['timeout']}, which the c10d rendezvous ignores.",
            f"Set join_timeout={conf['timeout']} instead.",
        )
    if backend == "static" and is_elastic:
        reader.add_problem(
            f"{reader.sources['nodes']} is a range, but the static rendezvous ({reader.sources['rdzv_backend']}) "
            "needs a fixed number of nodes.",
            "Use the rendezvous backend c10d, or a fixed number of nodes.",
        )
    endpoint = reader.find("rdzv_endpoint", parse_endpoint)
    if endpoint is None and config.endpoint and backend == config.backend:  # it belongs to the config's backend
        endpoint = EnvValue(parse_endpoint(config.endpoint), "distributed.rendezvous.endpoint")
    if backend in ("etcd", "etcd-v2") and endpoint is None and reader.is_valid("rdzv_endpoint"):
        reader.add_problem(
            f"{reader.sources['rdzv_backend']} is {backend}, but the address of the etcd server is not set.",
            "Set --rdzv-endpoint (or distributed.rendezvous.endpoint) to its host:port.",
        )
    return backend, conf, endpoint


def _nodes(reader: EnvReader, per_node: int, distributed: DistributedSection) -> tuple[int, int]:
    """Minimum and maximum number of nodes: set directly, or the world size divided by the processes per node."""
    nodes = reader.find("nodes", parse_node_range)
    from_variable = reader.find("world_size", parse_count)
    world_size = from_variable or from_config("world_size", distributed.world_size)
    # An operator that does not know how many processes `auto` or an option stand for counts one per pod. The source may
    # also be an option or a default: no variable has such a name, so its text is empty.
    is_pod_count = not (reader.text(reader.sources["processes_per_node"]) or "1").isdecimal()
    is_pod_count |= "processes_per_node" in reader.options
    if nodes and from_variable and reader.is_valid("nodes", "processes_per_node"):
        count, rest = divmod(from_variable.value, per_node)
        fits = rest == 0 and nodes.value[0] <= count <= nodes.value[1]
        if not fits and not (is_pod_count and nodes.value[0] <= from_variable.value <= nodes.value[1]):
            total = format_range((nodes.value[0] * per_node, nodes.value[1] * per_node))
            reader.add_problem(
                f"{from_variable}, but {format_range(nodes.value)} nodes ({nodes.source}) x {per_node} processes per "
                f"node ({reader.sources['processes_per_node']}) = {total}: WORLD_SIZE counts processes.",
                "Set WORLD_SIZE to nodes x processes per node, or NPROC_PER_NODE to the processes per node.",
                "nodes",
            )
    if not nodes and world_size and world_size.value % per_node and reader.is_valid("processes_per_node"):
        reader.add_problem(
            f"{world_size}, which is not a multiple of the {per_node} processes per node "
            f"({reader.sources['processes_per_node']}), and the number of nodes is not set.",
            "Set NNODES to the number of nodes, and WORLD_SIZE to nodes x processes per node.",
            "nodes",
        )
    derived = None
    if world_size:
        count = max(1, world_size.value // per_node)
        derived = EnvValue((count, count), world_size.source)
    return reader.resolve("nodes", nodes, derived, EnvValue((1, 1), "default")) or (1, 1)


def _node_rank(
    reader: EnvReader, hostname: str, distributed: DistributedSection, per_node: int, most: int
) -> int | None:
    """The rank of this node, and the problems of it; None if nothing says it."""
    # With one process per node RANK is the rank of the node. With more it has low precedence: a PyTorchJob counts pods
    # in it, others count processes.
    is_single = per_node == 1
    names = NAMES["node_rank"]
    if is_single:
        names += NAMES["rank"]
    from_variable = reader.find("node_rank", parse_rank, names)
    index = reader.find("pod_index", parse_rank)
    if "node_rank" not in reader.options:
        check_index(reader, from_variable, index)
    if is_single:
        from_rank = from_config("rank", distributed.rank)
    else:
        from_rank = reader.find("rank", parse_rank)
    derived = None
    ordinal = split_ordinal(hostname)
    if most == 1:
        derived = EnvValue(0, "default")
    elif ordinal:
        derived = EnvValue(ordinal[1], "hostname")
    node_rank = reader.resolve("node_rank", from_variable, index, from_rank, derived)
    if node_rank is not None and reader.is_valid("nodes", "node_rank", "world_size"):
        _check_node_rank(reader, node_rank, most)
    return node_rank


def _check_node_rank(reader: EnvReader, node_rank: int, most: int) -> None:
    """Refuse a rank without a number of nodes, or one that is too large for it."""
    source = reader.sources["node_rank"]
    has_nodes = reader.sources["nodes"] != "default"
    if reader.text("RANK") and not has_nodes:
        reader.add_problem(
            f"RANK is {reader.text('RANK')}, but WORLD_SIZE is not set.",
            "Set WORLD_SIZE too, or unset RANK to train in one process.",
            "node_rank",
        )
        return
    if node_rank < most:
        return
    nodes = "the number of nodes is not set."
    if has_nodes:
        nodes = f"the run has {most} nodes ({reader.sources['nodes']}): ranks are 0 to {most - 1}."
    remedy = "Set NNODES (or --nodes) to the number of pods: completions of the Job, replicas of the StatefulSet."
    if has_nodes and source not in NAMES["pod_index"]:
        remedy = "Set NODE_RANK to the rank of this node, or raise the number of nodes."
    reader.add_problem(f"{source} is {node_rank}, but {nodes}", remedy, "node_rank")


def read_master(
    reader: EnvReader,
    hostname: str,
    distributed: DistributedSection,
    *,
    peers: str | None,
    endpoint: EnvValue[tuple[str, int]] | None = None,
) -> tuple[str, int]:
    """Address and port of the master. `peers`: the nodes or processes that need it, for the error message; None for a
    run of one."""
    endpoint_host, endpoint_port = _host_and_port(endpoint)
    tcp_host, tcp_port = _host_and_port(_read_init_method(reader, distributed))
    default = None
    if not peers:
        default = EnvValue("127.0.0.1", "default")
    addr = reader.resolve(
        "master_addr",
        reader.find("master_addr", str, same=same_host),
        endpoint_host,
        from_config("master_addr", distributed.master_addr),
        tcp_host,
        default,
    )
    if addr is None and reader.is_valid("nodes", "world_size", "rdzv_endpoint", "init_method"):
        job = "<job>"
        ordinal = split_ordinal(hostname)
        if ordinal:
            job = ordinal[0]
        example = f"{job}-0.<headless service>"
        reader.add_problem(
            f"The run has {peers}, but MASTER_ADDR is not set.",
            f"Set MASTER_ADDR (or --master-addr) to the DNS name of pod 0, such as {example}, not of the Service.",
        )
    chosen = reader.resolve(
        "master_port",
        reader.find("master_port", parse_port),
        endpoint_port,
        from_config("master_port", distributed.master_port),
        tcp_port,
        EnvValue(DEFAULT_MASTER_PORT, "default"),
    )
    return addr or "", chosen or DEFAULT_MASTER_PORT


def _read_init_method(reader: EnvReader, distributed: DistributedSection) -> EnvValue[tuple[str, int]] | None:
    """Host and port of distributed.init_method, as tcp://HOST:PORT."""
    init_method = distributed.init_method or ""
    if not init_method.startswith("tcp://"):
        return None
    text = init_method.removeprefix("tcp://").partition("?")[0].rstrip("/")
    return next(reader.parse_all("init_method", [("distributed.init_method", text)], parse_endpoint), None)


def _host_and_port(endpoint: EnvValue[tuple[str, int]] | None) -> tuple[EnvValue[str] | None, EnvValue[int] | None]:
    if endpoint is None:
        return None, None
    host, port = endpoint.value
    return EnvValue(host, endpoint.source), EnvValue(port, endpoint.source)


def check_index(reader: EnvReader, rank: EnvValue[int] | None, index: EnvValue[int] | None) -> None:
    """A pod's index may be below its rank (workers beside a master), never above."""
    if rank and index and rank.value < index.value:
        reader.add_problem(
            f"{rank}, but {index}: two pods of the job would have the same rank.",
            f"Unset {rank.source}, or set it from {index.source}.",
            "node_rank",
        )


def check_local_rank(reader: EnvReader, local_rank: EnvValue[int] | None, per_node: int) -> None:
    if local_rank and local_rank.value >= per_node and reader.is_valid("processes_per_node", "local_world_size"):
        reader.add_problem(
            f"{local_rank}, but this node has {plural(per_node, 'process')}: it counts the processes of one node.",
            "Do not set LOCAL_RANK from the pod's index: with one process per pod it is 0. With several, also set "
            "LOCAL_WORLD_SIZE, as torchrun and `llmtrain node` do.",
            "local_rank",
        )


def format_range(bounds: tuple[int, int]) -> str:
    """`2`, or `2 to 4`"""
    fewest, most = bounds
    if fewest == most:
        return str(fewest)
    return f"{fewest} to {most}"


def _join(endpoint: tuple[str, int] | None) -> str | None:
    """host:port, with brackets around an IPv6 address."""
    if endpoint is None:
        return None
    host, port = endpoint
    if ":" in host:
        host = f"[{host}]"
    return f"{host}:{port}"
