"""The check of memory: what a process of the run needs, by llmtrain plan, and what this machine has."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.config.model import HfCausalLmSection
from llmtrain.config.run import RunSection
from llmtrain.config.schema import Config
from llmtrain.core.findings import Finding, failed, failed_by, passed, warned
from llmtrain.core.gpus import gpu_of_device
from llmtrain.core.text import format_bytes
from llmtrain.distributed.machine_limits import machine_memory
from llmtrain.doctor.environment import Position
from llmtrain.doctor.machine import uses_gpu
from llmtrain.errors import LlmtrainError
from llmtrain.plan.target import Target

if TYPE_CHECKING:
    from llmtrain.plan.memory_value import Memory
    from llmtrain.plan.plan import Plan

NAME = "memory"
REMEDY = (
    "Lower trainer.micro_batch_size and raise trainer.grad_accum_steps, or see `llmtrain plan --find` for other "
    "settings that fit."
)


def target_here(run: RunSection, position: Position) -> Target:
    """This machine as the target of a plan; of several GPUs, the one with the least memory."""
    processes = position.local_world_size
    nodes = max(1, position.world_size // processes)
    if not uses_gpu(run):
        return Target("cpu", machine_memory(), None, nodes, processes)
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    smallest = min(gpus, key=lambda gpu: gpu.total_memory)
    return Target("cuda", smallest.total_memory, gpu_of_device(smallest.name), nodes, processes)


def plan_here(config: Config, position: Position) -> "Plan":
    """Traces a step, which takes seconds. Downloads nothing."""
    from llmtrain.plan.plan import Plan, Verdict, make_plan

    target = target_here(config.run, position)
    if config.trainer.grad_accum_steps < position.world_size:  # refused by training; the memory is the same
        config = config.with_values("trainer", grad_accum_steps=position.world_size)
    section = config.model
    if isinstance(section, HfCausalLmSection) and not Path(section.path).expanduser().is_dir():
        reason = f"{section.path} is on the hub, and is not downloaded for this check"
    else:
        try:
            return make_plan(config, target)
        except LlmtrainError as error:  # these processes cannot share a step, which is not a matter of memory
            reason = error.what
    return Plan(target, Verdict.UNKNOWN, reason, None, None, None, None)


def memory(plan: "Plan") -> Iterator[Finding]:
    """Memory of the machine, shared by its processes; with GPUs, of one GPU for one process."""
    from llmtrain.plan.plan import Verdict

    if plan.problem is not None:
        yield failed_by(NAME, plan.problem)
        return
    limit = _limit_text(plan.target)
    if plan.memory is None or plan.size is None:
        yield passed(NAME, f"{limit}; requirement unknown: {plan.reason}")
        return
    evidence = f"{plan.size.parameters:,} parameters need {_need_text(plan.memory, plan.target)}, of {limit}"
    if plan.verdict is Verdict.DOES_NOT_FIT:
        yield failed(NAME, evidence, REMEDY)
    elif plan.verdict is Verdict.TIGHT:
        yield warned(NAME, f"{evidence}: {plan.reason}", REMEDY)
    elif plan.verdict is Verdict.UNKNOWN:
        yield passed(NAME, f"{evidence}; requirement unknown: {plan.reason}")
    else:
        yield passed(NAME, evidence)


def _limit_text(target: Target) -> str:
    owner = "of each GPU" if target.device == "cuda" else "of this machine or container"
    return f"{format_bytes(target.memory_bytes or 0)} {owner}"


def _need_text(memory: "Memory", target: Target) -> str:
    """`5.2 GB (weights 494 MB, gradients 494 MB, optimizer 989 MB, activations 2.75 GB, other 472 MB)`"""
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "gathered": memory.gathered,
        "activations": memory.activations or 0,
    }
    total = memory.needed
    if total is None:
        need = f"at least {format_bytes(memory.at_least)}"
    else:
        need = format_bytes(total)
        parts["other"] = max(0, total - sum(parts.values()))
    if target.device == "cpu" and target.processes_per_node > 1:
        need += f" in each of {target.processes_per_node} processes"
    listed = [f"{name} {format_bytes(size)}" for name, size in parts.items() if size]
    return f"{need} ({', '.join(listed)})"
