"""How the processes find each other: addresses, ranks and sizes, and the options of torchrun."""

import re
from collections.abc import Iterator

from llmtrain.distributed.nested_launcher import launcher_name, process_command
from llmtrain.distributed.shell_command import commands_in
from llmtrain.lint.command import Setting, is_index
from llmtrain.lint.model import OPERATOR_KINDS, Pod
from llmtrain.lint.rules.rule import Seen, all_pods, joined_pods, rule, shown, training_pods

INDEX_SELECTORS = ("job-completion-index", "pod-index", "replica-index", "pod-name", "job-role")
SOCKET_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_SLEEP_RANDOM = re.compile(r"\bsleep\b[^\n;&|]{0,200}\bRANDOM\b[^\n;&|]{0,200}")
_API_LOOKUP = re.compile(
    r"\bkubectl\s+(?:-\S+\s+\S+\s+){0,10}(?:get|describe|wait|label|annotate|patch|exec)\b[^\n;]*"
    r"|\b(?:curl|wget)\b[^\n]{0,500}(?:kubernetes\.default|KUBERNETES_SERVICE_HOST|KUBERNETES_PORT|/api/v1/namespaces)[^\n;]*"
)


def _selects_one(pod: Pod, name: str) -> bool:
    """Whether a Service stands for one pod alone: then its name is as good as the pod's."""
    service = pod.workload.manifests.service(name, pod.workload)
    if service is None:
        return False
    if any(label.rpartition("/")[2] in INDEX_SELECTORS for label, _ in service.get("spec", "selector").items()):
        return True
    selected = pod.workload.manifests.selected(service)
    return bool(selected) and sum(one.count or 2 for one in selected) == 1


@rule(
    "rdzv-endpoint-is-service",
    "error",
    "the rendezvous endpoint or MASTER_ADDR is the name of a Service that stands for all pods",
    why="The name leads to any of the pods, so every pod, or none, believes that it is the host, and they never meet.",
    fix="Write pod 0's own name: <job>-0.<service> (JobSet: <jobset>-<job>-0-0.<subdomain>).",
    over=joined_pods,
)
def endpoint_is_service(pod: Pod) -> Iterator[Seen]:
    for host, line, node in pod.endpoints:
        first = host.partition(".")[0]
        known = pod.workload.manifests.service(first, pod.workload)
        if (known is not None or first == pod.subdomain.text) and not _selects_one(pod, first):
            yield Seen(node, f"{shown(host)} is the Service, not pod 0", line)


@rule(
    "local-rank-is-pod-index",
    "error",
    "LOCAL_RANK is the number of the pod",
    why="LOCAL_RANK picks the GPU inside the pod; pod 1 with one GPU looks for a second one and fails.",
    fix="Leave LOCAL_RANK to torchrun; without it write 0 when the pod runs one process.",
    over=training_pods,
)
def local_rank_is_pod_index(pod: Pod) -> Iterator[Seen]:
    for container in pod.all_containers or pod.containers:
        for setting in container.settings(("local-rank",), ("LOCAL_RANK",)):
            if is_index(setting):
                yield Seen(setting.node, f"LOCAL_RANK is {shown(setting.raw)}", setting.line)


@rule(
    "world-size-mismatch",
    "error",
    "WORLD_SIZE is not nodes x processes per node",
    why="Every process waits until WORLD_SIZE of them have come: too many never come, too few leave some outside.",
    fix="Let torchrun set WORLD_SIZE, or write pods x processes per pod.",
    over=training_pods,
)
def world_size_mismatch(pod: Pod) -> Iterator[Seen]:
    nodes, processes = pod.workload.nodes, pod.processes
    if nodes is None or processes is None or not pod.sizes:
        return
    for container in pod.containers:
        size = container.variables.get("WORLD_SIZE")
        if size is None or size.number is None:
            continue
        counts_nodes = container.is_torchrun and "WORLD_SIZE" in container.flags.get("nnodes", size).raw
        if size.number not in {one * processes for one in pod.sizes} and not counts_nodes:
            evidence = f"WORLD_SIZE is {size.number}, but {nodes} x {processes} = {nodes * processes} processes start"
            yield Seen(size.node, evidence, size.line)


@rule(
    "nnodes-mismatch",
    "error",
    "NNODES or --nnodes is another number than the pods",
    why="Two numbers kept alike by hand drift apart; torchrun waits for nodes that never come, or leaves some out.",
    fix="Write the number of pods (completions, replicas, numNodes), or let the operator inject PET_NNODES.",
    over=training_pods,
)
def nnodes_mismatch(pod: Pod) -> Iterator[Seen]:
    sizes = pod.sizes
    for container in pod.containers:
        for setting in container.settings(("nnodes", "nodes"), ("PET_NNODES", "NNODES")):
            bounds = _bounds(setting)
            if not sizes or bounds is None or not _counts_nodes(pod, setting):
                continue
            if not any(bounds[0] <= size <= bounds[1] for size in sizes):
                evidence = f"{setting.name} is {shown(setting.value)}, the pods are {pod.workload.nodes}"
                yield Seen(setting.node, evidence, setting.line)


def _bounds(setting: Setting) -> tuple[int, int] | None:
    """`2` or `1:4`"""
    found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", setting.value)
    return (int(found[1]), int(found[2] or found[1])) if found else None


def _counts_nodes(pod: Pod, setting: Setting) -> bool:
    """`--nodes` is llmtrain's word; another program may mean anything with it."""
    return setting.name != "nodes" or any("llmtrain node" in c.command_line for c in pod.containers)


@rule(
    "rdzv-timeout-ignored",
    "warning",
    "`timeout=` in the rendezvous configuration of c10d",
    why="c10d does not read `timeout`: it stays at its default, and slow pods (image pulls) are given up early.",
    fix="Write join_timeout=600 (and read_timeout=60).",
    over=training_pods,
)
def rdzv_timeout_ignored(pod: Pod) -> Iterator[Seen]:
    for container in pod.containers:
        for setting in container.settings(("rdzv-conf",), ("PET_RDZV_CONF",)):
            if container.backend == "c10d" and re.search(r"(?:^|,)\s*timeout\s*=", setting.value):
                yield Seen(setting.node, f"{shown(setting.value)} with c10d", setting.line)
    policy = pod.workload.node.get("spec", "elasticPolicy")
    for row in policy.get("rdzvConf"):
        if policy.get("rdzvBackend").text == "c10d" and row.get("key").text == "timeout":
            yield Seen(row, "elasticPolicy.rdzvConf has timeout, with c10d")


@rule(
    "rdzv-etcd",
    "warning",
    "rendezvous by etcd",
    why="torchrun speaks etcd's v2 API, which current etcd servers no longer serve; and it is one more server to run.",
    fix="Use --rdzv-backend=c10d with pod 0's name as the endpoint.",
    over=training_pods,
)
def rdzv_etcd(pod: Pod) -> Iterator[Seen]:
    for container in pod.containers:
        for setting in container.settings(("rdzv-backend",), ("PET_RDZV_BACKEND",))[:1]:
            if setting.value.startswith("etcd"):
                yield Seen(setting.node, f"the backend is {shown(setting.value)}", setting.line)
    backend = pod.workload.node.get("spec", "elasticPolicy", "rdzvBackend")
    if backend.text.startswith("etcd"):
        yield Seen(backend, f"the backend is {shown(backend.text)}")


@rule(
    "static-without-node-rank",
    "error",
    "torchrun on several nodes with neither a node rank nor a rendezvous backend",
    why="The default backend is static, where a node without a rank is node 0: all of them are, and they never meet.",
    fix="Add --node-rank=$(JOB_COMPLETION_INDEX), or --rdzv-backend=c10d with --rdzv-endpoint and --rdzv-id.",
    over=joined_pods,
)
def static_without_node_rank(pod: Pod) -> Iterator[Seen]:
    for container in pod.containers:
        is_ranked = container.settings(("node-rank", "standalone"), ("PET_NODE_RANK",))
        is_told = container.node.get("envFrom").exists or pod.workload.kind in OPERATOR_KINDS
        if container.is_torchrun and container.backend == "static" and not is_ranked and not is_told:
            entry = next((e for e in container.entries if "torch" in e.text), container.node)
            yield Seen(entry, "torchrun without --node-rank and --rdzv-backend", entry.line_of("torch"))


@rule(
    "nested-launcher",
    "error",
    "torchrun, accelerate launch or deepspeed as the command of torchrun, of llmtrain node or of each other",
    why="Each process starts a world of its own: N runs train side by side, overwrite each other, and end with 0.",
    fix="Name the script itself: `torchrun ... train.py`, `llmtrain node ... -- python train.py`.",
    over=all_pods,
)
def nested_launcher(pod: Pod) -> Iterator[Seen]:
    for container in pod.containers:
        for command in container.commands:
            outer, process = process_command(command) or ("", [])
            for inner in filter(None, map(launcher_name, commands_in(process))):
                program = inner.partition(" ")[0]
                named = [e for e in container.entries if program in e.text or "torch.distributed" in e.text]
                entry = (named or [container.node])[-1]
                yield Seen(entry, f"{outer} starts {inner}", entry.line_of(program))


@rule(
    "node-rank-ignored",
    "advice",
    "--node-rank with the c10d backend",
    why="c10d gives ranks in the order of arrival; the node rank is only read by the static backend.",
    fix="Leave it out, and do not expect rank 0 in pod 0.",
    over=training_pods,
)
def node_rank_ignored(pod: Pod) -> Iterator[Seen]:
    for container in pod.containers:
        given = container.flags.get("node-rank")
        if given is not None and container.is_torchrun and container.backend == "c10d":
            yield Seen(given.node, "--node-rank with c10d", given.line)


@rule(
    "socket-interface-fixed",
    "warning",
    "the network interface is hard-coded",
    why="Interfaces have other names in other clusters and on other nodes; NCCL or Gloo then finds none and fails.",
    fix="Leave it out, or exclude what must not be used: ^lo,docker0.",
    over=training_pods,
)
def socket_interface_fixed(pod: Pod) -> Iterator[Seen]:
    for container in pod.containers:
        for setting in container.settings((), SOCKET_VARIABLES):
            if setting.is_literal and setting.value and not setting.value.startswith(("^", "$")):
                yield Seen(setting.node, f"{setting.name} is {shown(setting.value)}", setting.line)


@rule(
    "sleep-random",
    "warning",
    "`sleep $RANDOM` as synchronisation",
    why="Waiting for a random time makes a race rarer, not impossible, and slows every start.",
    fix="Wait for the thing itself: until pod 0's name resolves and its port answers, with a deadline.",
    over=training_pods,
)
def sleep_random(pod: Pod) -> Iterator[Seen]:
    for container in pod.all_containers or pod.containers:
        for entry, line, what in container.find(_SLEEP_RANDOM):
            yield Seen(entry, shown(what), line)


@rule(
    "api-lookup",
    "warning",
    "the pod asks the Kubernetes API for the master",
    why="That needs a Role, a token and a client in every pod, and fails wherever one of them is missing.",
    fix="Use pod 0's stable name: an Indexed Job with a subdomain and a headless Service needs no look-up.",
    over=training_pods,
)
def api_lookup(pod: Pod) -> Iterator[Seen]:
    for container in pod.all_containers or pod.containers:
        for entry, line, what in container.find(_API_LOOKUP):
            yield Seen(entry, shown(what), line)


RULES = (
    endpoint_is_service,
    local_rank_is_pod_index,
    world_size_mismatch,
    nnodes_mismatch,
    rdzv_timeout_ignored,
    rdzv_etcd,
    static_without_node_rank,
    nested_launcher,
    node_rank_ignored,
    socket_interface_fixed,
    sleep_random,
    api_lookup,
)
