"""Rendezvous: addresses, ranks, sizes, and the options of torchrun."""

import re
from collections.abc import Iterator

from llmtrain.distributed.nested_launcher import launcher_name, process_command
from llmtrain.distributed.shell_command import commands_in
from llmtrain.lint.container_command import Container, Setting, is_index
from llmtrain.lint.kinds import OPERATOR_KINDS
from llmtrain.lint.manifests import Pod
from llmtrain.lint.rules.rule import (
    Match,
    all_pods,
    matches_in_commands,
    multi_node_pods,
    rule,
    shorten,
    training_pods,
)
from llmtrain.lint.rules.services import RENDEZVOUS_PORTS

ENDPOINTS = ("PET_RDZV_ENDPOINT", "RDZV_ENDPOINT")
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
INDEX_SELECTORS = ("job-completion-index", "pod-index", "replica-index", "pod-name", "job-role")
SOCKET_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_SLEEP_RANDOM = re.compile(r"\bsleep\b[^\n;&|]{0,200}\bRANDOM\b[^\n;&|]{0,200}")
_API_LOOKUP = re.compile(
    r"\bkubectl\s+(?:-\S+\s+\S+\s+){0,10}(?:get|describe|wait|label|annotate|patch|exec)\b[^\n;]*"
    r"|\b(?:curl|wget)\b[^\n]{0,500}(?:kubernetes\.default|KUBERNETES_SERVICE_HOST|KUBERNETES_PORT|/api/v1/namespaces)[^\n;]*"
)


def _selects_one(pod: Pod, name: str) -> bool:
    """Whether a Service selects exactly one pod, so that its name is as good as that of the pod."""
    service = pod.workload.manifests.service(name, pod.workload)
    if service is None:
        return False
    for label, _ in service.get("spec", "selector").items():
        if label.rpartition("/")[2] in INDEX_SELECTORS:
            return True
    selected = pod.workload.manifests.selected(service)
    return len(selected) == 1 and selected[0].count == 1


@rule(
    "rdzv-endpoint-is-service",
    "error",
    "rendezvous endpoint or MASTER_ADDR is the name of a Service that selects all pods",
    why="The name resolves to any of the pods, so every pod or none takes itself for the host, and the "
    "rendezvous never completes.",
    remedy="Use the name of pod 0: <job>-0.<service> (JobSet: <jobset>-<job>-0-0.<subdomain>).",
    over=multi_node_pods,
)
def endpoint_is_service(pod: Pod) -> Iterator[Match]:
    for host, line, node in pod.endpoints:
        name = host.partition(".")[0]
        is_service = pod.workload.manifests.service(name, pod.workload) is not None or name == pod.subdomain.text
        if is_service and not _selects_one(pod, name):
            yield Match(node, f"{shorten(host)} is a Service, not pod 0", line)


@rule(
    "local-rank-is-pod-index",
    "error",
    "LOCAL_RANK is set to the index of the pod",
    why="LOCAL_RANK selects the GPU inside the pod; pod 1 with one GPU selects a second one and fails.",
    remedy="Let torchrun set LOCAL_RANK; without torchrun set it to 0 if the pod runs one process.",
    over=training_pods,
)
def local_rank_is_pod_index(pod: Pod) -> Iterator[Match]:
    for container in pod.all_containers:
        for setting in container.settings(("local-rank",), ("LOCAL_RANK",)):
            if is_index(setting):
                yield Match(setting.node, f"LOCAL_RANK is {shorten(setting.raw)}", setting.line)


@rule(
    "world-size-mismatch",
    "error",
    "WORLD_SIZE is not pods x processes per pod",
    why="Every process waits until WORLD_SIZE processes have joined: too large a number hangs, too small a "
    "number excludes some.",
    remedy="Let torchrun set WORLD_SIZE, or set it to pods x processes per pod.",
    over=training_pods,
)
def world_size_mismatch(pod: Pod) -> Iterator[Match]:
    nodes = pod.workload.nodes
    processes = pod.processes
    if nodes is None or processes is None or not pod.sizes:
        return
    for container in pod.containers:
        size = container.variables.get("WORLD_SIZE")
        if size is None or size.number is None:
            continue
        # torchrun --nnodes=$WORLD_SIZE: it counts nodes there.
        counts_nodes = container.is_torchrun and "WORLD_SIZE" in container.flags.get("nnodes", size).raw
        if size.number not in [count * processes for count in pod.sizes] and not counts_nodes:
            started = f"{nodes} pods x {processes} = {nodes * processes} processes start"
            yield Match(size.node, f"WORLD_SIZE is {size.number}, but {started}", size.line)


@rule(
    "nnodes-mismatch",
    "error",
    "NNODES or --nnodes differs from the number of pods",
    why="torchrun waits for nodes that never join, or excludes some.",
    remedy="Set it to the number of pods (completions, replicas, numNodes), or let the operator inject PET_NNODES.",
    over=training_pods,
)
def nnodes_mismatch(pod: Pod) -> Iterator[Match]:
    if not pod.sizes:
        return
    for container in pod.containers:
        for setting in container.settings(("nnodes", "nodes"), ("PET_NNODES", "NNODES")):
            bounds = _bounds(setting)
            if bounds is None or not _counts_nodes(pod, setting):
                continue
            fewest, most = bounds
            if not any(fewest <= size <= most for size in pod.sizes):
                evidence = f"{setting.name} is {shorten(setting.value)}, but there are {pod.workload.nodes} pods"
                yield Match(setting.node, evidence, setting.line)


def _bounds(setting: Setting) -> tuple[int, int] | None:
    """`2` or `1:4`"""
    found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", setting.value)
    if not found:
        return None
    return int(found[1]), int(found[2] or found[1])


def _counts_nodes(pod: Pod, setting: Setting) -> bool:
    """`--nodes` is an option of llmtrain; in other programs it may mean anything."""
    if setting.name != "nodes":
        return True
    return any("llmtrain node" in container.command_line for container in pod.containers)


@rule(
    "rdzv-timeout-ignored",
    "warning",
    "`timeout=` in the rendezvous configuration of c10d",
    why="c10d does not read `timeout`, so the default applies, and slow pods (image pulls) miss the rendezvous.",
    remedy="Use join_timeout=600 (and read_timeout=60).",
    over=training_pods,
)
def rdzv_timeout_ignored(pod: Pod) -> Iterator[Match]:
    for container in pod.containers:
        for setting in container.settings(("rdzv-conf",), ("PET_RDZV_CONF",)):
            if container.backend == "c10d" and re.search(r"(?:^|,)\s*timeout\s*=", setting.value):
                yield Match(setting.node, f"timeout in {shorten(setting.value)} has no effect with c10d", setting.line)
    policy = pod.workload.node.get("spec", "elasticPolicy")
    for row in policy.get("rdzvConf"):
        if policy.get("rdzvBackend").text == "c10d" and row.get("key").text == "timeout":
            yield Match(row, "timeout in elasticPolicy.rdzvConf has no effect with c10d")


@rule(
    "rdzv-etcd",
    "warning",
    "rendezvous with etcd",
    why="torchrun uses the v2 API of etcd, which current etcd servers do not serve, and it needs another server.",
    remedy="Use --rdzv-backend=c10d with the name of pod 0 as the endpoint.",
    over=training_pods,
)
def rdzv_etcd(pod: Pod) -> Iterator[Match]:
    for container in pod.containers:
        for setting in container.settings(("rdzv-backend",), ("PET_RDZV_BACKEND",))[:1]:
            if setting.value.startswith("etcd"):
                yield Match(setting.node, f"rendezvous backend is {shorten(setting.value)}", setting.line)
    backend = pod.workload.node.get("spec", "elasticPolicy", "rdzvBackend")
    if backend.text.startswith("etcd"):
        yield Match(backend, f"rendezvous backend is {shorten(backend.text)}")


@rule(
    "static-without-node-rank",
    "error",
    "torchrun on several nodes without a node rank and without a rendezvous backend",
    why="The default backend is static, where a missing node rank means 0: all pods have node rank 0 and "
    "never connect.",
    remedy="Add --node-rank=$(JOB_COMPLETION_INDEX), or --rdzv-backend=c10d with --rdzv-endpoint and --rdzv-id.",
    over=multi_node_pods,
)
def static_without_node_rank(pod: Pod) -> Iterator[Match]:
    for container in pod.containers:
        is_ranked = container.settings(("node-rank", "standalone"), ("PET_NODE_RANK",))
        may_be_set = container.node.get("envFrom").exists or pod.workload.kind in OPERATOR_KINDS
        if container.is_torchrun and container.backend == "static" and not is_ranked and not may_be_set:
            entry = container.entry_with("torch")
            yield Match(entry, "torchrun has neither --node-rank nor --rdzv-backend", entry.line_of("torch"))


@rule(
    "nested-launcher",
    "error",
    "a launcher (torchrun, accelerate launch, deepspeed, colossalai run, mpirun, ...) as the command of another one",
    why="Each process launches a separate world: N runs train in parallel, overwrite each other, and exit with 0.",
    remedy="Launch the script itself: `torchrun ... train.py`, `llmtrain node ... -- python train.py`.",
    over=all_pods,
)
def nested_launcher(pod: Pod) -> Iterator[Match]:
    for container in pod.containers:
        for command in container.commands:
            found = process_command(command)
            if found is None:
                continue
            outer, process = found
            for command_of_process in commands_in(process):
                inner = launcher_name(command_of_process)
                if inner is None:
                    continue
                program = inner.partition(" ")[0]
                entry = container.node
                for each in container.entries:  # the last one: the outer launcher comes first
                    if program in each.text or "torch.distributed" in each.text:
                        entry = each
                yield Match(entry, f"{outer} starts {inner}", entry.line_of(program))


@rule(
    "node-rank-ignored",
    "advice",
    "--node-rank with the c10d backend",
    why="c10d assigns ranks in the order of arrival; only the static backend reads the node rank.",
    remedy="Remove it, and do not rely on rank 0 being in pod 0.",
    over=training_pods,
)
def node_rank_ignored(pod: Pod) -> Iterator[Match]:
    for container in pod.containers:
        flag = container.flags.get("node-rank")
        if flag is not None and container.is_torchrun and container.backend == "c10d":
            yield Match(flag.node, "--node-rank has no effect with c10d", flag.line)


@rule(
    "probe-on-rendezvous-port",
    "error",
    "probe on the rendezvous port",
    why="Only pod 0 listens on this port: in all other pods the probe fails, and the kubelet restarts the container or "
    "never marks the pod as ready.",
    remedy="Remove the probe: a crash ends the process. To detect hangs, probe a port that every pod opens, or a file.",
    over=multi_node_pods,
)
def probe_on_rendezvous_port(pod: Pod) -> Iterator[Match]:
    if pod.role == "Master":
        return
    for container in pod.containers:
        by_name = {port.get("name").text: port.get("containerPort") for port in container.node.get("ports")}
        rendezvous_ports = _rendezvous_ports(container)
        for probe in PROBES:
            for handler in ("tcpSocket", "httpGet", "grpc"):
                field = container.node.get(probe, handler, "port")
                number = by_name.get(field.text, field).number  # a probe gives the name or the number
                if number in rendezvous_ports:
                    yield Match(field, f"{probe} of container {shorten(container.name)} connects to port {number}")


def _rendezvous_ports(container: Container) -> set[int]:
    """The ports that are set, else the defaults of torchrun and of the operators."""
    settings = container.settings(("master-port", "rdzv-endpoint"), ("MASTER_PORT", "PET_MASTER_PORT", *ENDPOINTS))
    ports = set()
    for setting in settings:
        if match := re.search(r"(?:^|:)(\d{1,5})$", setting.value):
            ports.add(int(match[1]))
    return ports or set(RENDEZVOUS_PORTS)


@rule(
    "socket-interface-fixed",
    "warning",
    "hard-coded network interface",
    why="Interface names differ between clusters and nodes; NCCL or Gloo fails if the interface does not exist.",
    remedy="Remove it, or exclude interfaces instead: ^lo,docker0.",
    over=training_pods,
)
def socket_interface_fixed(pod: Pod) -> Iterator[Match]:
    for container in pod.containers:
        for setting in container.settings((), SOCKET_VARIABLES):
            if setting.is_literal and setting.value and not setting.value.startswith(("^", "$")):
                yield Match(setting.node, f"{setting.name} is {shorten(setting.value)}", setting.line)


@rule(
    "sleep-random",
    "warning",
    "`sleep $RANDOM` as synchronization",
    why="A random delay makes a race rarer, not impossible, and slows down every start.",
    remedy="Wait for the condition itself, with a deadline: until the name of pod 0 resolves and its port "
    "accepts connections.",
    over=training_pods,
)
def sleep_random(pod: Pod) -> Iterator[Match]:
    yield from matches_in_commands(pod, _SLEEP_RANDOM, "delays the start at random")


@rule(
    "api-lookup",
    "warning",
    "the pod looks up the master in the Kubernetes API",
    why="It needs a Role, a token and a client in every pod, and fails if one of them is missing.",
    remedy="Use the stable name of pod 0: an Indexed Job with a subdomain and a headless Service needs no lookup.",
    over=training_pods,
)
def api_lookup(pod: Pod) -> Iterator[Match]:
    yield from matches_in_commands(pod, _API_LOOKUP, "calls the Kubernetes API")


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
    probe_on_rendezvous_port,
    socket_interface_fixed,
    sleep_random,
    api_lookup,
)
