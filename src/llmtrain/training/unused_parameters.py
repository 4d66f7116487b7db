"""Parameters that the loss does not depend on: a layer that is never called, the vision tower of a model that reads
text. They get no gradient, and DDP needs `find_unused_parameters`, because it waits for the gradients of all
parameters."""

import torch
from torch import nn

from llmtrain.core.logs import log
from llmtrain.core.text import first_names
from llmtrain.data.batches import Batch
from llmtrain.models.base import ModelAdapter, outermost_modules, parameter_count
from llmtrain.training.random_state import preserved


def unused_parameters(adapter: ModelAdapter, module: nn.Module, batch: Batch) -> list[str]:
    """Names of the trained parameters that the loss of a batch's first sequence does not depend on. Weights, buffers
    and random state stay as they are."""
    first = batch.first_sequence()
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with preserved():
        loss = adapter.loss(module, first.inputs, first.targets, first.positions)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    reached = _leaves(loss)
    return [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in reached]


def _leaves(loss: torch.Tensor) -> set[int]:
    """Ids of the tensors to which a backward pass would add a gradient. The graph is enough: nothing is computed."""
    found: set[int] = set()
    seen: set[object] = set()
    nodes: list[object] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # AccumulateGrad
            found.add(id(node.variable))
        nodes.extend(following for following, _ in getattr(node, "next_functions", ()))
    return found


def report_unused(module: nn.Module, without_gradient: list[nn.Parameter], step: int) -> None:
    """Log which parameters are not trained although they could be."""
    if not without_gradient:
        return
    unused = set(without_gradient)
    names = {name for name, parameter in module.named_parameters() if parameter in unused}
    others = {name for name, _ in module.named_parameters()} - names
    count = sum(parameter.numel() for parameter in unused)
    log(
        "TRAIN",
        f"{count:,} of {parameter_count(module):,} parameters got no gradient in step {step}, and are not trained "
        f"if they never get one: {first_names(outermost_modules(names, others))}",
    )
