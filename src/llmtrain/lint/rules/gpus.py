"""GPUs: how they are requested, and the number of processes that use them."""

from collections.abc import Iterator

from llmtrain.core.text import plural
from llmtrain.lint.container_command import Container
from llmtrain.lint.manifests import Pod, Workload
from llmtrain.lint.rules.rule import Match, all_pods, rule, shorten, training_pods
from llmtrain.lint.yaml_nodes import Node


@rule(
    "gpu-without-limit",
    "error",
    "GPUs (or other extended resources) in requests without the same limit",
    why="The API server rejects the pod: extended resources cannot be overcommitted, so both must be equal.",
    remedy="Set them in limits; requests default to the limits.",
    over=all_pods,
)
def gpu_without_limit(pod: Pod) -> Iterator[Match]:
    for container in pod.all_containers:
        limits = dict(container.resources.get("limits").items())
        for name, amount in container.resources.get("requests").items():
            if not _is_extended(name):
                continue
            limit = limits.get(name)
            if limit is None:
                problem = "has no limit"
            elif limit.number not in (None, amount.number):
                problem = f"has the limit {limit.number}"
            else:
                continue
            yield Match(amount, f"container {shorten(container.name)}: {shorten(name)} in requests {problem}")


def _is_extended(resource: str) -> bool:
    return resource.startswith("hugepages-") or ("/" in resource and not resource.startswith("kubernetes.io/"))


@rule(
    "more-processes-than-gpus",
    "error",
    "more processes per pod than GPUs",
    why="Each process uses the GPU of its local rank; the ones beyond the last GPU fail (invalid device ordinal).",
    remedy="Request as many GPUs as processes, or use --nproc-per-node=gpu.",
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
    remedy="Start one process per GPU (--nproc-per-node=gpu), or request fewer GPUs.",
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
            where = "the pod"
            if container.name:
                where = f"container {shorten(container.name)}"
            yield processes, gpus, Match(node, f"{what}, but {where} has {plural(gpus, 'GPU')}", line)


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
    for one in pod.workload.runtime.pods:
        for container in one.containers:
            if container.gpus:
                return container.gpus
    return None


def _processes(pod: Pod, container: Container) -> tuple[int, str, Node, int] | None:
    """(number, what sets it, node, line) of the processes that a container starts."""
    setting = container.process_setting
    if setting is not None:
        if setting.number is None:
            return None
        name = setting.name
        if name in container.flags:
            name = f"--{name}"
        return setting.number, f"{name} is {setting.number}", setting.node, setting.line
    field = pod.workload.processes
    if field.exists:
        if field.number is None:
            return None
        name = "numProcPerNode"
        if pod.workload.kind == "PyTorchJob":
            name = "nprocPerNode"
        return field.number, f"{name} is {field.number}", field, field.line
    if container.is_torchrun:
        entry = container.entry_with("torch")
        return 1, "torchrun starts 1 process (--nproc-per-node is unset)", entry, entry.line_of("torch")
    return None


RULES = (gpu_without_limit, more_processes_than_gpus, idle_gpus)
