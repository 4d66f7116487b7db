"""Memory of a launch, from the formula of plan/: does the run fit, and what is `launch.resources.memory: auto`.

The formula takes milliseconds and no torch. `llmtrain plan` is more exact: it traces a step.
"""

from dataclasses import dataclass

from llmtrain.config.kubernetes_types import AUTO, amount
from llmtrain.config.schema import Config
from llmtrain.core.text import format_bytes
from llmtrain.errors import UsageError
from llmtrain.launch.job import JobPlan
from llmtrain.launch.pod_task import PodTask
from llmtrain.plan.formula import CannotTell, estimate_by_formula
from llmtrain.plan.launch_target import gpu_of_launch, launch_target, uses_gpu, worker_bytes
from llmtrain.plan.memory_value import Memory
from llmtrain.plan.plan import Verdict, judge
from llmtrain.plan.target import Target

GIB = 1 << 30
MOST_BYTES = 32 << 40
"""Of a pod."""


@dataclass(frozen=True)
class MemoryCheck:
    verdict: Verdict
    text: str
    """What is wrong, or why it is not known; empty if the run fits."""
    remedy: str


def check_memory(plan: JobPlan, config_name: str = "CONFIG") -> MemoryCheck | None:
    """Whether the run fits in its GPUs, or in its pods. None for tasks that do not train. `config_name`: for the
    remedy."""
    if plan.task.mode != "train":
        return None
    config = plan.config
    target = launch_target(config)
    remedy = f"Find settings that fit: llmtrain plan --config {config_name}{_target_options(plan)} --find"
    try:
        _, memory = estimate_by_formula(config, target)
    except CannotTell as problem:
        return MemoryCheck(Verdict.UNKNOWN, f"It is not known whether the run fits: {problem}.", remedy)
    verdict, reason = judge(memory, target)
    if verdict is Verdict.UNKNOWN:
        if target.memory_bytes is None:
            reason = "launch.node_selector does not say which GPU the nodes have"
        return MemoryCheck(verdict, f"It is not known whether the run fits: {reason}.", remedy)
    if verdict is not Verdict.DOES_NOT_FIT:
        return MemoryCheck(verdict, "", "")
    return MemoryCheck(verdict, _does_not_fit(memory, target), remedy)


def memory_warnings(plan: JobPlan) -> list[str]:
    """That the run does not fit, if so."""
    check = check_memory(plan)
    return [check.text] if check is not None and check.verdict is Verdict.DOES_NOT_FIT else []


def _does_not_fit(memory: Memory, target: Target) -> str:
    assert target.memory_bytes is not None
    margin = f"±{memory.uncertainty * 100:.0f} %"
    need = memory.needed
    if need is None:
        need = memory.at_least
        margin = "without activations"
    limit = format_bytes(target.memory_bytes)
    if target.device == "cuda":
        name = target.gpu.name if target.gpu else "GPU"
        return f"The run does not fit: it needs {format_bytes(need)} ({margin}) of the {limit} of each {name}."
    need *= target.processes_per_node
    return f"The run does not fit: a pod needs {format_bytes(need)} ({margin}) of launch.resources.memory {limit}."


def _target_options(plan: JobPlan) -> str:
    """The same target, for `llmtrain plan` on another machine."""
    config = plan.config
    launch = config.launch
    if not uses_gpu(config):
        device = "" if config.run.device == "cpu" else " --set run.device=cpu"
        return f"{device} --memory {launch.resources.memory}"
    gpu = gpu_of_launch(launch)
    return f" --gpu {gpu.name}" if gpu else " --gpu GPU"


def with_pod_memory(config: Config, task: PodTask) -> Config:
    """The config with a number in the place of launch.resources.memory `auto`."""
    if config.launch.resources.memory != AUTO:
        return config
    if task.mode == "command":
        raise _no_estimate("the memory of a command is not known")
    try:
        _, memory = estimate_by_formula(config, launch_target(config))
    except CannotTell as problem:
        raise _no_estimate(str(problem)) from None
    if uses_gpu(config):
        process = memory.host
    elif memory.peak is None:
        raise _no_estimate(memory.unknown["peak"])
    else:
        process = int(memory.peak * (1 + memory.uncertainty))
    shared = int(amount(config.launch.resources.shm_size))
    total = process * config.launch.processes_per_node + worker_bytes(config) + shared
    if total > MOST_BYTES:
        raise _no_estimate(f"{format_bytes(total)} is more than any node has")
    resources = config.launch.resources.model_copy(update={"memory": f"{-(-total // GIB)}Gi"})
    return config.with_values("launch", resources=resources)


def _no_estimate(reason: str) -> UsageError:
    return UsageError(
        f"launch.resources.memory is auto, but it cannot be estimated: {reason}.",
        remedy="Set it to a number, for example --set launch.resources.memory=16Gi.",
    )
