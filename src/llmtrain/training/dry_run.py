"""`llmtrain train --dry-run`: does the model fit, and how large is it?"""

from typing import Any

from llmtrain.config.schema import Config
from llmtrain.config.trainer import training_bytes
from llmtrain.distributed.batch_split import micro_batches_in_step
from llmtrain.distributed.world import World, current_process_info, pick_device
from llmtrain.logs import setup_logging
from llmtrain.models.base import block_matrices, parameter_count, trainable_count
from llmtrain.progress import phase
from llmtrain.training.build import (
    build_components,
    checkpoint_activations,
    resolve_steps,
    resolve_threads,
    set_up_torch,
)
from llmtrain.training.memory_errors import explained
from llmtrain.training.precision import autocast_for
from llmtrain.training.throughput import peak_memory_bytes


def dry_run(config: Config) -> dict[str, Any]:
    """Run one forward pass and report sizes; writes nothing but the token cache."""
    setup_logging(config.logging)
    world = World(device=pick_device(config.run.device))
    micro_batches_in_step(config, current_process_info(config.distributed).world_size)
    config, _ = resolve_threads(config, None, world)
    set_up_torch(config)
    phase("reading data")
    components = build_components(config, world, is_dry_run=True)
    module = components.module
    batch = components.train_batches[0].to(world.device)
    checkpoint_activations(config, components.adapter, module)
    remedy = "Halve trainer.micro_batch_size and double trainer.grad_accum_steps, or choose a smaller model."
    # With gradients: the activations that a training step keeps count too.
    with explained(world.device, remedy), autocast_for(config, components.adapter, world.device)():
        total = components.adapter.loss(module, batch.inputs, batch.targets, batch.positions)
        loss = total.item() / max(1, batch.target_count)
    config = resolve_steps(config, components.train_batches)
    trainable = trainable_count(module)
    matrices = sum(parameter.numel() for parameter in block_matrices(components.adapter, module).values())
    weight_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    bytes_per_weight = max((p.element_size() for p in module.parameters() if p.requires_grad), default=4)
    return {
        "dry_run": True,
        "model": config.model.name,
        "device": str(world.device),
        "parameters": parameter_count(module),
        "trainable_parameters": trainable,
        "vocab_size": components.adapter.vocab_size,
        "train_tokens": components.train_batches.tokens,
        "val_tokens": len(components.prepared.val),
        "eval_batches": len(components.eval_batches),
        "tokens_per_step": round(components.train_batches.tokens_per_step),
        "steps": config.trainer.steps,
        "epochs": round(config.trainer.steps / components.train_batches.steps_in(1), 3),
        "loss": loss,
        "state_bytes": weight_bytes + training_bytes(config.trainer.optimizer, trainable, matrices, bytes_per_weight),
        "peak_memory_bytes": peak_memory_bytes(world.device),
    }
