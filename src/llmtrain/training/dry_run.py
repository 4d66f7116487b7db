"""`llmtrain train --dry-run`: does the model fit, and how large is it?"""

from typing import Any

import torch
from torch import nn

from llmtrain.config.data import DummyTextSection
from llmtrain.config.schema import Config
from llmtrain.core.logs import setup_logging
from llmtrain.core.progress import phase
from llmtrain.distributed.batch_split import micro_batches_in_step
from llmtrain.distributed.machine_limits import machine_memory
from llmtrain.distributed.process_info import ProcessInfo
from llmtrain.distributed.world import World, check_strategy, current_process_info, pick_device
from llmtrain.models.base import ModelAdapter, block_matrices, parameter_count, trainable_count
from llmtrain.models.device_precision import autocast_for
from llmtrain.plan.plan import Plan, make_plan, with_vocabulary
from llmtrain.plan.states import training_bytes
from llmtrain.plan.target import Target
from llmtrain.training.components import build_components
from llmtrain.training.memory_errors import explained
from llmtrain.training.model_handle import checkpoint_activations, unparallel_handle
from llmtrain.training.schedule import max_steps_of, warn_if_short
from llmtrain.training.throughput import peak_memory_bytes
from llmtrain.training.torch_settings import resolve_threads, set_up_torch


def dry_run(config: Config) -> dict[str, Any] | None:
    """Run one forward pass and report sizes; writes nothing but the token cache. Under a launcher rank 0 does that
    alone and reports the batch of all processes; None on other ranks."""
    setup_logging(config.logging)
    process = current_process_info(config.distributed)
    check_strategy(config.distributed, process)
    micro_batches = micro_batches_in_step(config.trainer, config.distributed, process.world_size)
    if process.rank > 0:
        return None
    # A world of one, with the micro-batches of all: the report needs no other process.
    world = World(device=pick_device(config.run.device))
    given = config
    config = config.with_values("trainer", grad_accum_steps=micro_batches, scale_batch=False)
    threads, _ = resolve_threads(config.run, None, world.local_world_size)
    config = config.with_values("run", threads=threads)
    set_up_torch(config.run)
    phase("reading data")
    components = build_components(config, world, is_dry_run=True)
    module = components.module
    batch = components.train_batches[0].to(world.device)
    checkpoint_activations(components.adapter, module, config.trainer)
    remedy = "Halve trainer.micro_batch_size and double trainer.grad_accum_steps, or choose a smaller model."
    # With gradients: the activations that a training step keeps count too.
    with explained(world.device, remedy), autocast_for(config.trainer, components.adapter, world.device)():
        total = components.objective.sums(unparallel_handle(components), batch).loss
        loss = total.item() / max(1, components.objective.items(batch))
    config = config.with_values("trainer", max_steps=max_steps_of(config.trainer, components.train_batches))
    warn_if_short(config.trainer, is_smoke_test=isinstance(config.data, DummyTextSection))
    plan = make_plan(with_vocabulary(given, components.adapter.vocab_size), _this_machine(process, world.device))
    return {
        "dry_run": True,
        "model": config.model.name,
        "device": str(world.device),
        "world_size": process.world_size,
        "parameters": parameter_count(module),
        "trainable_parameters": trainable_count(module),
        "vocab_size": components.adapter.vocab_size,
        "train_tokens": components.train_batches.tokens,
        "val_tokens": components.prepared.val_tokens,
        "eval_batches": len(components.eval_batches),
        "tokens_per_step": round(components.train_batches.tokens_per_step),
        "steps": config.trainer.steps,
        "epochs": round(config.trainer.steps / components.train_batches.steps_in(1), 3),
        "loss": loss,
        "state_bytes": _state_bytes(plan, components.adapter, module, config.trainer.optimizer),
        "peak_memory_bytes": peak_memory_bytes(world.device),
        "plan": {
            "verdict": plan.verdict.value,
            "reason": plan.reason,
            "memory": plan.memory.as_dict() if plan.memory else None,
        },
    }


def _this_machine(process: ProcessInfo, device: torch.device) -> Target:
    """All nodes are like this one."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else machine_memory()
    nodes = max(1, process.world_size // process.local_world_size)
    return Target(device.type, memory, None, nodes, process.local_world_size)


def _state_bytes(plan: Plan, adapter: ModelAdapter, module: nn.Module, optimizer: str) -> int:
    """Weights, gradients and the optimizer's averages of one process."""
    memory = plan.memory
    if memory is not None:
        return memory.weights + memory.gradients + memory.optimizer
    # A plugin that cannot be built without data, but here it has been built with it
    weights = sum(parameter.nbytes for parameter in module.parameters())
    matrices = sum(parameter.numel() for parameter in block_matrices(adapter, module).values())
    element_size = max((p.element_size() for p in module.parameters() if p.requires_grad), default=4)
    return weights + training_bytes(optimizer, trainable_count(module), matrices, element_size)
