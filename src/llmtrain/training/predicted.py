"""What a run is predicted to need on the machines that it has, recorded by each of its starts."""

import torch

from llmtrain.core.gpus import gpu_of_device
from llmtrain.distributed.world import World
from llmtrain.errors import LlmtrainError
from llmtrain.models.base import ModelAdapter
from llmtrain.plan.history import past_runs
from llmtrain.plan.plan import with_vocabulary
from llmtrain.plan.prediction import predict
from llmtrain.plan.target import Target
from llmtrain.training.context import RunContext
from llmtrain.training.throughput import device_name

RECENT_RUNS = 20
"""Earlier runs that a start reads: all ranks wait for it. `llmtrain plan` reads all."""
Values = dict[str, int | float | str | None]


def predicted(context: RunContext, adapter: ModelAdapter) -> Values | None:
    """None if a prediction is not possible. It takes milliseconds, and reads the results of earlier runs."""
    config = with_vocabulary(context.config, adapter.vocab_size)
    try:
        found = predict(config, _target(context.world), past_runs(config.output.root_dir, RECENT_RUNS))
    except (LlmtrainError, OSError):
        return None
    return found.as_dict()


def _target(world: World) -> Target:
    gpu = gpu_of_device(device_name(world.device)) if world.device.type == "cuda" else None
    memory = torch.cuda.get_device_properties(world.device).total_memory if world.device.type == "cuda" else None
    nodes = max(1, world.world_size // world.local_world_size)
    return Target(world.device.type, memory, gpu, nodes, world.local_world_size)
