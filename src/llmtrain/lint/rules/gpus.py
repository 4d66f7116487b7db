"""GPUs: how they are requested, and the number of processes that use them."""

from collections.abc import Iterator

from llmtrain.lint.container_command import Container
from llmtrain.lint.manifests import Pod, Workload
from llmtrain.lint.rules.rule import Match, all_pods, rule, shorten, training_pods
from llmtrain.lint.yaml_nodes import Node
from llmtrain.text import plural


@rule(
    "gpu-without-limit",
    "error",
    "GPUs (or other extended resources) in requests without the same limit",
    why="The API server rejects the pod: extended resources cannot be overcommitted, so both must be equal.",
    fix="Set them in limits; requests default to the limits.",
    over=all_pods,
)
def gpu_without_limit(pod: Pod) -> Iterator[Match]:
    for container in pod.all_containers:
        limits = dict(container.resources.get("limits").items())
        for name, amount in container.resources.get("requests").items():
            limit = limits.get(name)
            if not _is_extended(name) or (limit is not None and limit.number in (None, amount.number)):
                continue
            problem = "has no limit" if limit is None else f"has the limit {limit.number}"
            yield Match(amount, f"container {shorten(container.name)}: {shorten(name)} in requests {problem}")


def _is_extended(resource: str) -> bool:
    return resource.startswith("hugepages-") or ("/" in resource and not resource.startswith("kubernetes.io/"))


@rule(
    "more-processes-than-gpus",
    "error",
    "more processes per pod than GPUs",
    why="Each process uses the GPU of its local rank; the ones beyond the last GPU fail (invalid device ordinal).",
    fix="Request as many GPUs as processes, or use --nproc-per-node=gpu.",
    over=training_pods,
)
def more_processes_than_gpus(pod: Pod) -> Iterator[Match]:
    for processes, gpus, match in _processes_and_gpus(pod):
        if processes > gpus:
            yield match


@rule(
    "idle-gpus",
    "warning",
    "fewer processes per pod than GPUs",
    why="A process uses one GPU; the others are allocated and idle.",
    fix="Start one process per GPU (--nproc-per-node=gpu), or request fewer GPUs.",
    over=training_pods,
)
def idle_gpus(pod: Pod) -> Iterator[Match]:
    for processes, gpus, match in _processes_and_gpus(pod):
        if processes < gpus:
            yield match


def _processes_and_gpus(pod: Pod) -> Iterator[tuple[int, int, Match]]:
    """(processes, GPUs, occurrence) of each container where both are known."""
    if _is_decided_elsewhere(pod):
        return
    for container in pod.containers:
        gpus = container.gpus or _gpus_of_runtime(pod)
        found = _processes(pod, container)
        if gpus is not None and found is not None:
            processes, what, node, line = found
            has_gpus = f"container {shorten(container.name)} has" if container.name else "the pod has"
            yield processes, gpus, Match(node, f"{what}, but {has_gpus} {plural(gpus, 'GPU')}", line)


def _is_decided_elsewhere(pod: Pod) -> bool:
    """Whether a TrainJob leaves both numbers to its runtime in the files, or a runtime's numbers are overridden."""
    if pod.workload.kind == "TrainJob":
        return pod.workload.runtime is not None and not _overrides(pod.workload)
    return any(_overrides(job) for job in pod.workload.manifests.train_jobs if job.runtime is pod.workload)


def _overrides(train_job: Workload) -> bool:
    trainer = train_job.node.get("spec", "trainer")
    return trainer.get("numProcPerNode").exists or trainer.get("resourcesPerNode").exists


def _gpus_of_runtime(pod: Pod) -> int | None:
    """GPUs in the runtime of a TrainJob that does not set its own."""
    if pod.is_complete or pod.workload.runtime is None:
        return None
    containers = [container for one in pod.workload.runtime.pods for container in one.containers]
    return next((container.gpus for container in containers if container.gpus), None)


def _processes(pod: Pod, container: Container) -> tuple[int, str, Node, int] | None:
    """(number, what sets it, node, line) of the processes that a container starts."""
    own, field = container.process_setting, pod.workload.processes
    if own is not None:
        name = f"--{own.name}" if own.name in container.flags else own.name
        return None if own.number is None else (own.number, f"{name} is {own.number}", own.node, own.line)
    if field.exists:
        name = "nprocPerNode" if pod.workload.kind == "PyTorchJob" else "numProcPerNode"
        return None if field.number is None else (field.number, f"{name} is {field.number}", field, field.line)
    if container.is_torchrun:
        entry = next((entry for entry in container.entries if "torch" in entry.text), container.node)
        return 1, "torchrun starts 1 process (--nproc-per-node is unset)", entry, entry.line_of("torch")
    return None


RULES = (gpu_without_limit, more_processes_than_gpus, idle_gpus)
