"""The place of one node among those of the run, from options, environment, config and hostname.

Each value is a list of sources, the first that is set wins. Problems go to the reader; identity.py raises them.
"""

import functools
from dataclasses import dataclass

from llmtrain.config.distributed import DEFAULT_MASTER_PORT, DistributedSection, RendezvousSection
from llmtrain.distributed.env import (
    NAMES,
    EnvReader,
    EnvValue,
    backend,
    endpoint,
    from_config,
    node_range,
    number,
    port,
    processes,
    same_host,
    settings,
    size,
    split_ordinal,
)


@dataclass(frozen=True)
class NodeOptions:
    """Options of the command line. One that is given overrides everything else."""

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
    """One node among those of the run."""

    node_rank: int | None  # None: decided when the nodes meet, and nothing said it before
    min_nodes: int
    max_nodes: int
    processes_per_node: int
    master_addr: str
    master_port: int
    rdzv_backend: str | None
    rdzv_id: str | None
    rdzv_conf: dict[str, str]
    rdzv_endpoint: str | None
    sources: dict[str, str]  # where each value came from

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
        reader.complain(
            f"TORCHELASTIC_RUN_ID is {reader.text('TORCHELASTIC_RUN_ID')!r}: `llmtrain node` was started by torchrun.",
            "Start `llmtrain train` with torchrun, or `llmtrain node` without it: node starts the processes itself.",
        )
    on_node = reader.find("processes_per_node", functools.partial(processes, environ=reader.environ))
    per_node = reader.settle("processes_per_node", on_node, EnvValue(1, "default")) or 1
    check_local_rank(reader, reader.find("local_rank", number), per_node)
    fewest, most = _nodes(reader, per_node, distributed)
    # A process that trains has been started already: how nodes meet is no longer its business.
    wanted = RendezvousSection() if is_train else distributed.rendezvous
    kind = reader.settle(
        "rdzv_backend", reader.find("rdzv_backend", backend), from_config("rendezvous.backend", wanted.backend)
    )
    conf = reader.settle("rdzv_conf", reader.find("rdzv_conf", settings)) or {}
    if kind == "c10d" and "timeout" in conf:
        reader.complain(
            f"{reader.sources['rdzv_conf']} has timeout={conf['timeout']}, which the c10d rendezvous does not read.",
            f"Write join_timeout={conf['timeout']}.",
        )
    if kind == "static" and fewest != most:
        reader.complain(
            f"{reader.sources['nodes']} is {fewest}:{most}, but the static rendezvous "
            f"({reader.sources['rdzv_backend']}) takes one number of nodes.",
            "Use the rendezvous backend c10d, or one number of nodes.",
        )
    meeting = reader.find("rdzv_endpoint", endpoint)
    if meeting is None and wanted.endpoint and kind == wanted.backend:  # the config's is for its own backend only
        meeting = EnvValue(endpoint(wanted.endpoint), "distributed.rendezvous.endpoint")
    if kind in ("etcd", "etcd-v2") and meeting is None and reader.sound("rdzv_endpoint"):
        reader.complain(
            f"{reader.sources['rdzv_backend']} is {kind}, but nothing says where the etcd server is.",
            "Set --rdzv-endpoint (or distributed.rendezvous.endpoint) to its host:port.",
        )
    host_port = reader.settle("rdzv_endpoint", meeting)
    node_rank = _node_rank(reader, hostname, distributed, per_node, most)
    is_decided_later = fewest != most or kind not in (None, "static")
    if node_rank is None and (is_train or not is_decided_later) and reader.sound("node_rank", "nodes"):
        reader.complain(
            f"{reader.sources['nodes']} says there are {most} nodes, but nothing says which one this is: RANK, "
            f"NODE_RANK and JOB_COMPLETION_INDEX are not set, and the hostname {hostname!r} ends in no number.",
            "Set NODE_RANK (from 0), or run an Indexed Job or a StatefulSet, which number their pods.",
        )
    company = f"{reader.sources['nodes']} says there are {in_words((fewest, most))} nodes" if most > 1 else None
    master_addr, master_port = read_master(reader, hostname, distributed, company=company, meeting=meeting)
    return NodeInfo(
        node_rank=node_rank,
        min_nodes=fewest,
        max_nodes=most,
        processes_per_node=per_node,
        master_addr=master_addr,
        master_port=master_port,
        rdzv_backend=kind,
        rdzv_id=reader.settle("rdzv_id", reader.find("rdzv_id", str)),
        rdzv_conf=conf,
        rdzv_endpoint=_join(*host_port) if host_port else None,
        sources=dict(reader.sources),
    )


def _nodes(reader: EnvReader, per_node: int, distributed: DistributedSection) -> tuple[int, int]:
    """Fewest and most nodes: said so, or the number of processes divided by those of a node."""
    said = reader.find("nodes", node_range)
    world = reader.find("world_size", size)
    counted = world or from_config("world_size", distributed.world_size)
    # An operator that cannot know how many processes `auto` gives, or what an option says, counts one a pod.
    is_pod_count = not (reader.text(reader.sources["processes_per_node"]) or "1").isdecimal()
    is_pod_count |= "processes_per_node" in reader.options
    if said and world and reader.sound("nodes", "processes_per_node"):
        nodes, rest = divmod(world.value, per_node)
        fits = rest == 0 and said.value[0] <= nodes <= said.value[1]
        if not fits and not (is_pod_count and said.value[0] <= world.value <= said.value[1]):
            reader.complain(
                f"{world}, but {in_words(said.value)} nodes ({said.source}) x {per_node} processes per node "
                f"({reader.sources['processes_per_node']}) are {in_words(said.value, per_node)}: it counts processes.",
                "Set WORLD_SIZE to nodes x processes per node, or NPROC_PER_NODE to the processes of a node.",
                "nodes",
            )
    if not said and counted and counted.value % per_node and reader.sound("processes_per_node"):
        reader.complain(
            f"{counted}, which is no multiple of the {per_node} processes per node "
            f"({reader.sources['processes_per_node']}): nothing else says how many nodes there are.",
            "Set NNODES to the number of nodes, and WORLD_SIZE to nodes x processes per node.",
            "nodes",
        )
    share = max(1, counted.value // per_node) if counted else 1
    derived = EnvValue((share, share), counted.source) if counted else None
    return reader.settle("nodes", said, derived, EnvValue((1, 1), "default")) or (1, 1)


def _node_rank(
    reader: EnvReader, hostname: str, distributed: DistributedSection, per_node: int, most: int
) -> int | None:
    """With one process a node RANK is the node's rank. With more it is the last to ask: PyTorchJob counts pods in
    it, other people processes. A pod's index may be below its rank (workers beside a master), never above."""
    is_single = per_node == 1
    said = reader.find("node_rank", number, NAMES["node_rank"] + NAMES["rank"] * is_single)
    index = reader.find("pod_index", number)
    ordinal = split_ordinal(hostname)
    if "node_rank" not in reader.options:
        check_index(reader, said, index)
    node_rank = reader.settle(
        "node_rank",
        said,
        index,
        None if is_single else reader.find("rank", number),
        from_config("rank", distributed.rank) if is_single else None,
        EnvValue(ordinal[1], "hostname") if ordinal and most > 1 else None,
        EnvValue(0, "default") if most == 1 else None,
    )
    if node_rank is None or not reader.sound("nodes", "node_rank", "world_size"):
        return node_rank
    source, is_unsaid = reader.sources["node_rank"], reader.sources["nodes"] == "default"
    if is_unsaid and reader.text("RANK"):
        reader.complain(
            f"RANK is {reader.text('RANK')}, but WORLD_SIZE is not set: nothing says how many processes there are.",
            "Set WORLD_SIZE too, or unset RANK to train in one process.",
            "node_rank",
        )
    elif node_rank >= most:
        reader.complain(
            f"{source} is {node_rank}, but "
            + ("nothing says how many nodes there are." if is_unsaid else f"there are {most} nodes ")
            + ("" if is_unsaid else f"({reader.sources['nodes']}): ranks run from 0 to {most - 1}."),
            "Set NNODES (or --nodes) to the number of pods: the completions of the Job, the replicas of the set."
            if is_unsaid or source in NAMES["pod_index"]
            else "Set NODE_RANK to this node's own number, or raise the number of nodes.",
            "node_rank",
        )
    return node_rank


def read_master(
    reader: EnvReader,
    hostname: str,
    distributed: DistributedSection,
    *,
    company: str | None,
    meeting: EnvValue[tuple[str, int]] | None = None,
) -> tuple[str, int]:
    """Address and port of the master. `company` says who else there is, None where nobody."""
    init_method = distributed.init_method or ""
    is_tcp = init_method.startswith("tcp://")
    text = init_method.removeprefix("tcp://").partition("?")[0].rstrip("/") if is_tcp else None
    tcp = next(reader.parsed("init_method", [("distributed.init_method", text)], endpoint), None)
    addr = reader.settle(
        "master_addr",
        reader.find("master_addr", str, same=same_host),
        EnvValue(meeting.value[0], meeting.source) if meeting else None,
        from_config("master_addr", distributed.master_addr),
        EnvValue(tcp.value[0], tcp.source) if tcp else None,
        None if company else EnvValue("127.0.0.1", "default"),
    )
    if addr is None and reader.sound("nodes", "world_size", "rdzv_endpoint", "init_method"):
        ordinal = split_ordinal(hostname)
        example = f"{ordinal[0] if ordinal else '<job>'}-0.<headless service>"
        reader.complain(
            f"{company}, but MASTER_ADDR is not set: nothing says where they meet.",
            f"Set MASTER_ADDR (or --master-addr) to pod 0's own name, such as {example}, not to the Service's.",
        )
    chosen = reader.settle(
        "master_port",
        reader.find("master_port", port),
        EnvValue(meeting.value[1], meeting.source) if meeting else None,
        from_config("master_port", distributed.master_port),
        EnvValue(tcp.value[1], tcp.source) if tcp else None,
        EnvValue(DEFAULT_MASTER_PORT, "default"),
    )
    return addr or "", chosen or DEFAULT_MASTER_PORT


def check_index(reader: EnvReader, rank: EnvValue[int] | None, index: EnvValue[int] | None) -> None:
    if rank and index and rank.value < index.value:
        reader.complain(
            f"{rank}, but {index}: pods of one job would share a rank.",
            f"Unset {rank.source}, or take it from {index.source}.",
            "node_rank",
        )


def check_local_rank(reader: EnvReader, local_rank: EnvValue[int] | None, per_node: int) -> None:
    if local_rank and local_rank.value >= per_node and reader.sound("processes_per_node", "local_world_size"):
        reader.complain(
            f"{local_rank}, but this node runs {per_node} process{'es' * (per_node > 1)}: it counts those of one node.",
            "Do not take LOCAL_RANK from the pod's index: with one process a pod it is 0. With several, set "
            "LOCAL_WORLD_SIZE too, as torchrun and `llmtrain node` do.",
            "local_rank",
        )


def in_words(nodes: tuple[int, int], times: int = 1) -> str:
    fewest, most = nodes[0] * times, nodes[1] * times
    return str(fewest) if fewest == most else f"{fewest} to {most}"


def _join(host: str, host_port: int) -> str:
    return f"[{host}]:{host_port}" if ":" in host else f"{host}:{host_port}"
