"""What muon costs: the time of a training step, and of the optimizer alone, with muon and with AdamW.

    python benchmarks/optimizer_overhead.py [--batch 64 32 16] [--size 124m] [--steps 20] [--rounds 5]

On a GPU: GPT-2 of that size, context 1024, bf16, compiled. On a CPU: a tiny GPT in float32, not compiled.
The rounds of both optimizers alternate; the median of each counts. Prints one ratio per batch size.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

from llmtrain.config.model import GptSection
from llmtrain.config.trainer import TrainerSection
from llmtrain.distributed.world import World
from llmtrain.models.base import block_matrices
from llmtrain.models.gpt.adapter import GPTAdapter
from llmtrain.training import newton_schulz
from llmtrain.training.optimizer import build_adamw, build_muon
from llmtrain.training.schedule import set_schedule

SIZES = {"124m": (12, 768, 12), "350m": (24, 1024, 16)}
VOCABULARY = 50257
TINY = TrainerSection(lr=1e-6, schedule="constant", momentum=0.95, momentum_warmup_steps=250)
"""Steps that hardly change the weights."""


def timed(device: torch.device, steps: int, body: Callable[[], None]) -> float:
    """Seconds per call."""
    body()
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    for _ in range(steps):
        body()
    wait()
    return (time.perf_counter() - started) / steps


def build(size: str, device: torch.device) -> tuple[GPTAdapter, nn.Module]:
    torch.manual_seed(0)
    if device.type == "cpu":
        adapter = GPTAdapter(GptSection(block_size=64, d_model=128, n_layers=4, n_heads=4), 65)
    else:
        layers, width, heads = SIZES[size]
        section = GptSection(block_size=1024, d_model=width, n_layers=layers, n_heads=heads)
        adapter = GPTAdapter(section, VOCABULARY)
    return adapter, adapter.build().to(device)


def optimizer_of(name: str, adapter: GPTAdapter, module: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    if name == "adamw":
        return build_adamw(module, TrainerSection())
    config = TrainerSection(optimizer="muon", compile=device.type == "cuda")  # then with our kernel
    return build_muon(adapter, module, config, World(device=device), batched=device.type != "cpu")


def time_steps(
    batch: int, adapter: GPTAdapter, module: nn.Module, arguments: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    """Median seconds of a step by optimizer."""
    length = adapter.config.block_size
    tokens = torch.randint(adapter.vocab_size, (batch, length + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    is_gpu = device.type == "cuda"
    loss = adapter.compiled_loss(module, by_block=False) if is_gpu else adapter.loss
    optimizers = {name: optimizer_of(name, adapter, module, device) for name in ("adamw", "muon")}

    def step(optimizer: torch.optim.Optimizer) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16) if is_gpu else nullcontext():
            total = loss(module, inputs, targets, None) / (batch * length)
        total.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
        set_schedule(optimizer, 0, TINY)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    rounds: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(arguments.rounds):
        for name, optimizer in optimizers.items():
            rounds[name].append(timed(device, arguments.steps, lambda optimizer=optimizer: step(optimizer)))
    return {name: statistics.median(seconds) for name, seconds in rounds.items()}


def time_optimizers(
    adapter: GPTAdapter, module: nn.Module, arguments: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    """Median seconds of the update alone, and of its parts."""
    matrices = list(block_matrices(adapter, module).values())
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    bodies: dict[str, Callable[[], None]] = {
        name: optimizer_of(name, adapter, module, device).step for name in ("adamw", "muon")
    }
    for optimizer in (bodies[name].__self__ for name in bodies):  # type: ignore[attr-defined]
        set_schedule(optimizer, 0, TINY)
    sections = adapter.matrix_sections(module)
    pieces = [
        piece
        for name, parameter in block_matrices(adapter, module).items()
        for piece in parameter.grad.split(sections.get(name, [parameter.shape[0]]))  # type: ignore[union-attr]
    ]
    is_gpu = device.type == "cuda"
    bodies["newton_schulz"] = lambda: newton_schulz.orthogonalize_(pieces, batched=is_gpu)
    if is_gpu:
        bodies["newton_schulz_by_kernel"] = lambda: newton_schulz.orthogonalize_(pieces, True, uses_kernel=True)
        bodies["torch.optim.Muon (matrices only)"] = torch.optim.Muon(matrices, lr=1e-6, adjust_lr_fn="original").step
    rounds: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(arguments.rounds):
        for name, body in bodies.items():
            rounds[name].append(timed(device, arguments.steps, body))
    module.zero_grad(set_to_none=True)
    return {name: statistics.median(seconds) for name, seconds in rounds.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, nargs="+")
    parser.add_argument("--size", choices=SIZES, default="124m")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    adapter, module = build(arguments.size, device)
    print(f"the update alone, {arguments.size if device.type == 'cuda' else 'a tiny GPT'} on {device}:")
    for name, seconds in time_optimizers(adapter, module, arguments, device).items():
        print(f"  {name:36}{seconds * 1e3:9.2f} ms")
    for batch in arguments.batch or ([64, 32, 16] if device.type == "cuda" else [12]):
        torch._dynamo.reset()  # else the second batch size is compiled for any size
        found = time_steps(batch, adapter, module, arguments, device)
        ratio = found["muon"] / found["adamw"]
        rates = {name: batch * adapter.config.block_size / seconds for name, seconds in found.items()}
        print(
            f"batch {batch}: adamw {found['adamw'] * 1e3:.2f} ms ({rates['adamw']:,.0f} tokens/s), "
            f"muon {found['muon'] * 1e3:.2f} ms ({rates['muon']:,.0f} tokens/s), ratio muon / adamw {ratio:.3f}"
        )


if __name__ == "__main__":
    main()
