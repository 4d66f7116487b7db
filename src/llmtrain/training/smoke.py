"""`llmtrain smoke`: a classifier that any machine trains in a second, under the same World as a real run."""

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.config.schema import Config
from llmtrain.distributed.batch_split import check_power_of_two
from llmtrain.distributed.control_group import peer_errors
from llmtrain.distributed.parallel import parallelize
from llmtrain.distributed.world import World, join_world, process_info_here
from llmtrain.errors import TrainingFailed, UsageError
from llmtrain.logs import log

LOG_EVERY = 5


def train_classifier(
    config: Config, epochs: int, batch: int, samples: int, features: int, classes: int, lr: float, seed: int
) -> dict[str, Any] | None:
    """Losses and accuracy, on rank 0. It fails when nothing was learned: then the collectives do not add up."""
    if batch > samples:
        raise UsageError(f"--batch {batch} is more than --samples {samples}.")
    check_power_of_two(config.distributed, process_info_here(config.distributed).world_size)
    with join_world(config.distributed, config.run) as world, peer_errors():
        if batch % world.world_size:
            raise UsageError(f"--batch {batch} cannot be shared by {world.world_size} processes.")
        started = time.perf_counter()
        torch.manual_seed(seed)
        inputs, labels = make_samples(samples, features, classes)
        model = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, classes)).to(world.device)
        wrapped = parallelize(model, lambda _: [], config.distributed, world, "fp32", world.world_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        log("DDP", f"rank {world.rank} of {world.world_size} on {world.device}: a classifier on {samples} samples")
        first_loss = last_loss = 0.0
        mine = batch // world.world_size
        steps = samples // batch
        for epoch in range(epochs):
            order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch))
            for step in range(steps):
                chosen = order[step * batch + world.rank * mine :][:mine]
                with wrapped.micro_step(is_last=True):
                    logits = wrapped.module(inputs[chosen].to(world.device))
                    loss = F.cross_entropy(logits, labels[chosen].to(world.device), reduction="sum") / batch
                    (loss * wrapped.loss_scale).backward()  # type: ignore[no-untyped-call]
                wrapped.after_backward()
                wrapped.finish_gradients()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                last_loss = float(world.control.gather_rows(loss).sum())
                first_loss = first_loss or last_loss
                if step % LOG_EVERY == 0 or step == steps - 1:
                    log("TRAIN", f"epoch {epoch + 1}/{epochs} | step {step + 1}/{steps} | loss {last_loss:.4f}")
            accuracy = measure(wrapped.module, inputs, labels, world)
            log("EPOCH", f"{epoch + 1}/{epochs} | loss {last_loss:.4f} | accuracy {accuracy:.1%}")
        if last_loss >= first_loss:
            raise TrainingFailed(
                f"The loss did not fall: {first_loss:.4f} -> {last_loss:.4f}.",
                remedy="With the default options it does, unless gradients get lost on the way: run `llmtrain doctor`.",
            )
        log("DONE", f"{epochs} epochs, loss {first_loss:.4f} -> {last_loss:.4f}, accuracy {accuracy:.1%}")
        result = {
            "world_size": world.world_size,
            "device": str(world.device),
            "first_loss": first_loss,
            "final_loss": last_loss,
            "accuracy": accuracy,
            "seconds": round(time.perf_counter() - started, 2),
        }
        return result if world.is_first else None


def make_samples(count: int, features: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Clouds around one centre a class: easy, so that learning shows within seconds."""
    centres = torch.randn(classes, features)
    labels = torch.arange(count) % classes
    return centres[labels] + torch.randn(count, features), labels


@torch.no_grad()
def measure(module: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, world: World) -> float:
    """Share of the samples that are told right; ranks look at every so-manieth, the same number each."""
    count = len(inputs) // world.world_size
    mine = torch.arange(count) * world.world_size + world.rank
    right = module(inputs[mine].to(world.device)).argmax(-1).cpu() == labels[mine]
    return world.control.sum(int(right.sum())) / (count * world.world_size)
