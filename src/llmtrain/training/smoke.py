"""`llmtrain smoke`: trains a classifier in seconds, in the same World as a real run."""

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.config.distributed import DistributedSection
from llmtrain.config.run import RunSection
from llmtrain.core.logs import log
from llmtrain.distributed.batch_split import check_power_of_two
from llmtrain.distributed.control_group import peer_errors
from llmtrain.distributed.parallel import parallelize
from llmtrain.distributed.world import World, current_process_info, join_world
from llmtrain.errors import TrainingFailed, UsageError
from llmtrain.runs.progress_lines import log_smoke_step

LOG_EVERY = 5


def train_classifier(
    distributed: DistributedSection,
    run: RunSection,
    epochs: int = 2,
    batch: int = 256,
    samples: int = 4096,
    features: int = 128,
    classes: int = 4,
    lr: float = 3e-3,
    seed: int = 42,
) -> dict[str, Any] | None:
    """Losses and accuracy on rank 0, None on other ranks. Raises TrainingFailed if the loss did not fall, which means
    that gradients are lost between the processes."""
    _check_steps(epochs, batch, samples)
    check_power_of_two(distributed, current_process_info(distributed).world_size)
    with join_world(distributed, run) as world, peer_errors():
        if batch % world.world_size:
            raise UsageError(f"--batch must be divisible by the {world.world_size} processes, got {batch}.")
        started = time.perf_counter()
        torch.manual_seed(seed)
        inputs, labels = make_samples(samples, features, classes)
        model = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, classes)).to(world.device)
        parallel = parallelize(model, lambda _: [], distributed, world, "fp32", world.world_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        log(
            "DDP",
            f"rank {world.rank} of {world.world_size} on {world.device}: a classifier on {samples} samples",
        )
        first_loss = last_loss = 0.0
        per_rank = batch // world.world_size
        steps = samples // batch
        for epoch in range(epochs):
            order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch))
            for step in range(steps):
                chosen = order[step * batch + world.rank * per_rank :][:per_rank]
                with parallel.micro_step(is_last=True):
                    logits = parallel.module(inputs[chosen].to(world.device))
                    loss = F.cross_entropy(logits, labels[chosen].to(world.device), reduction="sum") / batch
                    (loss * parallel.loss_scale).backward()  # type: ignore[no-untyped-call]
                parallel.after_backward()
                parallel.finish_gradients()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                last_loss = float(world.control.gather_tensors(loss).sum())
                first_loss = first_loss or last_loss
                if step % LOG_EVERY == 0 or step == steps - 1:
                    log_smoke_step(epoch + 1, epochs, step + 1, steps, last_loss)
            accuracy = measure_accuracy(parallel.module, inputs, labels, world)
            log("EPOCH", f"{epoch + 1}/{epochs} | loss {last_loss:.4f} | accuracy {accuracy:.1%}")
        if last_loss >= first_loss:
            raise TrainingFailed(
                f"The loss did not fall: {first_loss:.4f} -> {last_loss:.4f}.",
                remedy="With the default options it falls unless gradients are lost. Run `llmtrain doctor`.",
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


def _check_steps(epochs: int, batch: int, samples: int) -> None:
    if batch > samples:
        raise UsageError(f"--batch must be at most --samples ({samples}), got {batch}.")
    if epochs * (samples // batch) < 2:
        raise UsageError(
            f"{samples} samples in batches of {batch} are a single step, after which no loss can have fallen.",
            remedy="Raise --epochs or --samples, or lower --batch.",
        )


def make_samples(count: int, features: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normally distributed samples around one center per class, which are easy to learn."""
    centers = torch.randn(classes, features)
    labels = torch.arange(count) % classes
    return centers[labels] + torch.randn(count, features), labels


@torch.no_grad()
def measure_accuracy(module: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, world: World) -> float:
    """Accuracy. Rank r scores samples r, r + world_size, ..., the same number on each rank."""
    count = len(inputs) // world.world_size
    own = torch.arange(count) * world.world_size + world.rank
    is_correct = module(inputs[own].to(world.device)).argmax(-1).cpu() == labels[own]
    return world.control.sum(int(is_correct.sum())) / (count * world.world_size)
